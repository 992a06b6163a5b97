/* The models of the service by what they can do, and how the service is doing. */
const ABLE = { chat: "talks", completion: "continues text", tools: "calls tools", thinking: "thinks", insert: "fills in", embedding: "embeds", rerank: "ranks", classify: "classifies" };
const short = bytes => bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(0)} MB` : `${(bytes / 1e3).toFixed(0)} kB`;
const count = n => n >= 1e9 ? `${(n / 1e9).toPrecision(3)}B` : n >= 1e6 ? `${(n / 1e6).toPrecision(3)}M` : n >= 1e3 ? `${(n / 1e3).toPrecision(3)}K` : `${n}`;
let samplings = {};

async function call(path, options) {
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await reason(answer));
  return answer.json();
}
async function reason(answer) {
  try { return (await answer.json()).error.message; } catch { return `the service answered ${answer.status}`; }
}
async function models(kept) {
  try {
    const found = (await call("v1/models", {})).data;
    listed(found);
    const chat = found.filter(m => m.chats !== false);
    if (!chat.length) throw new Error("No model of this service has a chat template: they embed, translate, or continue text over HTTP.");
    for (const m of chat) { $("model").append(new Option(m.id, m.id)); samplings[m.id] = m.sampling; }
    if (kept.model && chat.some(m => m.id === kept.model)) $("model").value = kept.model;
    own(); show();
    $("send").disabled = false;
  } catch (error) { notice(error.message); }
}
/* A line of facts and the abilities of each model; one that is not loaded has told none yet. */
function listed(found) {
  $("models").replaceChildren(...found.map(m => {
    const row = make("li"), able = make("div", "chips");
    row.append(make("div", "model-name", m.id));
    const facts = [m.parameters && `${count(m.parameters)} parameters`, m.quantization, m.size && short(m.size), m.max_model_len && `${count(m.max_model_len)} tokens`].filter(Boolean);
    if (facts.length) row.append(make("div", "soft", facts.join(", ")));
    for (const name of m.capabilities || []) if (!(name === "completion" && m.capabilities.includes("chat"))) able.append(make("span", "chip", ABLE[name] || name));
    if (!m.loaded) able.append(make("span", "chip", "not loaded"));
    row.append(able); return row;
  }));
}

/* Speed and memory, while somebody looks. */
let before = null;
async function watch() {
  if (document.hidden || !$("service").checkVisibility()) return;
  let status;
  try { status = await call("status", {}); } catch { $("service").replaceChildren(make("div", "error", "The service does not answer.")); return; }
  const now = performance.now(), model = status.models.find(m => m.id === $("model").value), engine = model?.engine;
  if (!engine) { $("service").replaceChildren(make("div", "soft", model?.error || "This model is not loaded.")); before = null; return; }
  const speed = before?.id === model.id && now > before.now ? Math.max(0, engine.new_tokens - before.tokens) / (now - before.now) * 1000 : 0;
  before = { id: model.id, now, tokens: engine.new_tokens };
  const rows = [["Speed now", `${speed.toFixed(1)} tokens/s`], ["Requests", `${engine.running} running, ${engine.waiting} waiting`], ["Weights", short(model.bytes)],
    ["KV cache", `${short(engine.kv_bytes_used)} of ${short(engine.kv_bytes)}`], ["Prefix cache hits", `${(100 * engine.prefix_hit_rate).toFixed(0)} %`]];
  const list = make("dl");
  for (const [name, value] of rows) list.append(make("dt", "", name), make("dd", "", value));
  $("service").replaceChildren(list);
}
