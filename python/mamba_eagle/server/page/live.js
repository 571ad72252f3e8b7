// The numbers at the top, once a second while the page is looked at.

import {get} from "./api.js";

const EVERY = 1000, AFTER_ERROR = 5000; // milliseconds
let timer = 0;
export let server = null; // what /server_info said last

function show(name, text) {
  document.querySelector(`[data-live=${name}]`).textContent = text;
}

const share = (value) => `${Math.round(100 * value)}%`;

async function update() {
  clearTimeout(timer);
  if (document.hidden) return;
  let wait = EVERY;
  try {
    server = await get("server_info");
    const [now] = server.internal_states;
    show("running", now.num_running_reqs);
    show("queued", now.num_queue_reqs);
    show("speed", Math.round(now.gen_throughput));
    show("acceptance", now.spec_accept_length ? now.spec_accept_length.toFixed(2) : "–");
    show("cache", share(now.cache_hit_rate));
  } catch (error) {
    for (const place of document.querySelectorAll("[data-live]")) place.textContent = "–";
    if (error.status === 401) return; // until there is a key
    wait = AFTER_ERROR;
  }
  clearTimeout(timer);
  timer = setTimeout(update, wait);
}

document.addEventListener("visibilitychange", update);
export {update as watchServer};
