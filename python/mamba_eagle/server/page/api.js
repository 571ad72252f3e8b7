// Requests to the server that this page came from, whatever path a proxy offers it below.

const KEY = "mamba-eagle-key"; // in sessionStorage: gone with the tab

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const saveKey = (key) => sessionStorage.setItem(KEY, key);

async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = {"Content-Type": "application/json"};
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, document.baseURI), {...options, headers});
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(0, "The server does not answer. Is it still running?");
  }
  if (response.ok) return response;
  if (response.status === 401) document.dispatchEvent(new Event("key-needed"));
  throw new ServerError(response.status, await reason(response));
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

export const get = async (path) => (await request(path)).json();

// Works on plain http, too, where crypto.randomUUID does not exist.
const name = () =>
  "page-" + Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");

// A request that streams. `for await (const event of stream)` gives its events.
export class Stream {
  #rid = name();
  #abort = new AbortController();
  stopped = false;

  constructor(path, body) {
    this.path = path;
    this.body = {...body, rid: this.#rid, stream: true};
  }

  // Ends the request on the server as well, even behind a proxy that keeps the connection open.
  async stop() {
    this.stopped = true;
    const told = request("abort_request", {method: "POST", body: JSON.stringify({rid: this.#rid})});
    this.#abort.abort();
    await told.catch(() => {}); // it had ended
  }

  async *[Symbol.asyncIterator]() {
    const options = {method: "POST", body: JSON.stringify(this.body), signal: this.#abort.signal};
    const response = await request(this.path, options);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let buffer = "";
    for (;;) {
      const {done, value} = await reader.read();
      if (done) throw new ServerError(0, "The connection ended before the answer did.");
      buffer += value;
      const events = buffer.split("\n\n");
      buffer = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue; // a comment that keeps the connection alive
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const content = JSON.parse(data);
        if (content.error) throw new ServerError(500, content.error.message);
        yield content;
      }
    }
  }
}
