// One prompt as it stands, by /generate.

import {Stream} from "./api.js";
import {Output, facts} from "./output.js";
import {sampling, wantsTrees} from "./settings.js";
import {make} from "./tree.js";

const $ = (id) => document.getElementById(id);

export function start() {
  const {max_tokens, seed, ...params} = sampling();
  return new Stream("generate", {
    text: $("prompt").value,
    sampling_params: {...params, max_new_tokens: max_tokens, sampling_seed: seed},
    return_spec_trace: wantsTrees(),
    incremental: true,
  });
}

export async function run(stream, clock) {
  const text = make("div", "text output");
  text.setAttribute("aria-label", "Answer");
  const note = make("p", "facts");
  $("answer").replaceChildren(text, note);
  const output = new Output(text, stream.body.return_spec_trace);
  let meta = null;
  try {
    for await (const reply of stream) {
      meta = reply.meta_info;
      clock.take(meta.completion_tokens);
      output.addSteps(meta.spec_trace ?? []);
      output.addText(text, reply.text);
      note.textContent = told("running");
    }
  } finally {
    output.finish(text);
    if (meta) note.textContent = told(stream.stopped ? "stopped by you" : ending(meta.finish_reason));
  }

  function told(ended) {
    const counts = {completion: meta.completion_tokens, prompt: meta.prompt_tokens, cached: meta.cached_tokens};
    return facts(output, counts, clock.speed, ended);
  }
}

function ending(reason) {
  if (!reason) return "cut off";
  if (reason.type === "length") return "ended by max tokens";
  return typeof reason.matched === "string" ? "ended by a stop string" : "ended by the model";
}
