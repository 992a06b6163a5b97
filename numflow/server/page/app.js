/* The page: settings, the conversation that is shown, its list, and the message that is written. */
const KEEP = ["system", "temperature", "top_p", "max_tokens", "seed", "alternatives", "tint"];
const DRAWN = { temperature: 0.7, top_p: 1 };  // the model's own, which /v1/models tells, until somebody changes them
let talk = new Talk(), running = null, live = null, files = [], changed = new Set();

/* Settings stay in this browser. */
function load() {
  let kept = {};
  try { kept = JSON.parse(localStorage.getItem("numflow") || "{}"); } catch { kept = {}; }
  changed = new Set(kept.changed || []);
  for (const id of KEEP) if (id in kept && (!(id in DRAWN) || changed.has(id))) $(id)[$(id).type === "checkbox" ? "checked" : "value"] = kept[id];
  show();
  return kept;
}
function save(event) {
  if (event.target.id in DRAWN) changed.add(event.target.id);
  own();
  const kept = { model: $("model").value, changed: [...changed] };
  for (const id of KEEP) kept[id] = $(id).type === "checkbox" ? $(id).checked : $(id).value;
  try { localStorage.setItem("numflow", JSON.stringify(kept)); } catch { /* a browser without storage forgets */ }
  show();
}
function own() {
  const sampling = samplings[$("model").value] || {};
  for (const id in DRAWN) if (!changed.has(id)) $(id).value = sampling[id] ?? DRAWN[id];
}
function show() {
  for (const range of document.querySelectorAll("input[type=range]")) range.parentElement.querySelector("output").textContent = (+range.value).toFixed(2);
  $("top_p").disabled = +$("temperature").value === 0;
}

/* The list of conversations. */
function list() {
  $("chats").replaceChildren(...Talk.all().map(one => {
    const row = make("li", one.id === talk.id ? "on" : "");
    const open = button(row, one.name, () => { visit(one.id); drawer(false); });
    open.className = "open";
    if (one.id === talk.id) open.setAttribute("aria-current", "true");
    button(row, "✎", () => rename(one, row), `Rename ${one.name}`).className = "act";
    button(row, "⤓", () => download(`${one.name.replace(/[^\p{L}\p{N} _-]/gu, "").trim().slice(0, 60) || "conversation"}.json`, one.exported($("system").value)), `Export ${one.name}`).className = "act";
    const drop = button(row, "✕", () => {
      if (!drop.classList.contains("sure")) { drop.classList.add("sure"); drop.textContent = "delete?"; drop.setAttribute("aria-label", `Really delete ${one.name}?`); return; }
      one.forget();
      if (one.id === talk.id) { talk = new Talk(); fresh(); } else list();
      say("deleted");
    }, `Delete ${one.name}`);
    drop.className = "act drop";
    return row;
  }));
}
function rename(one, row) {
  const field = make("input"); field.value = one.name; field.setAttribute("aria-label", "Name of the conversation");
  field.onkeydown = e => {
    if (e.key === "Escape") { e.stopPropagation(); list(); }
    if (e.key !== "Enter") return;
    const found = one.id === talk.id ? talk : one;
    found.title = field.value.trim(); note(found.keep()); list();
  };
  row.replaceChildren(field); field.select();
}
function download(name, text) {
  const link = make("a"); link.href = URL.createObjectURL(new Blob([text], { type: "application/json" })); link.download = name;
  document.body.append(link); link.click(); link.remove(); setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

/* Go away from the conversation that is shown; what an answer has so far is kept. */
function leave() {
  if (live) { live.node.how = "interrupted"; keep(); }
  running?.abort(); running = live = null; state();
}
function keep() {
  if (live) Object.assign(live.node, { content: live.text, thinking: live.thinking });
  note(talk.keep()); remember(talk.id); list();
}
function visit(id) {
  const kept = Talk.read(id);
  if (!kept) { fresh(); return; }
  leave(); talk = kept; draw(); remember(id); list();
  $("log").scrollTop = $("log").scrollHeight;
}
/* The branch that is shown. Answers of this visit keep what is known of their words. */
function draw() {
  tip(null);
  $("log").replaceChildren(...talk.branch.map(node => {
    if (node.role === "user") return bubble(node);
    node.reply ||= Object.assign(new Reply(node.model), { node }).restored(node);
    node.reply.stats(); return node.reply.root;
  }));
}
/* Ways between the versions of a message. */
function versions(where, node) {
  const all = talk.versions(node), at = all.indexOf(node);
  if (all.length < 2) return;
  const go = to => { if (running) return; talk.show(all[to]); draw(); keep(); };
  const box = make("span", "versions"); box.setAttribute("role", "group"); box.setAttribute("aria-label", "Versions");
  button(box, "‹", () => go(at - 1), "Previous version").disabled = at === 0;
  box.append(make("span", "", `${at + 1}/${all.length}`));
  button(box, "›", () => go(at + 1), "Next version").disabled = at === all.length - 1;
  where.append(box);
}

function request(begun) {
  const messages = talk.branch.filter(node => node !== live.node).map(node => ({ role: node.role, content: whole(node) }));
  if ($("system").value.trim()) messages.unshift({ role: "system", content: $("system").value });
  if (begun) messages.push({ role: "assistant", content: begun });
  const body = { model: $("model").value, messages, stream: true, ...(begun ? { continue_final_message: true } : {}) };
  for (const id of changed) if (id !== "top_p" || +$("temperature").value > 0) body[id] = +$(id).value;
  if ($("max_tokens").value) body.max_tokens = +$("max_tokens").value;
  if ($("seed").value) body.seed = +$("seed").value;
  if (+$("alternatives").value > 0) { body.logprobs = true; body.top_logprobs = Math.min(20, +$("alternatives").value); }
  return body;
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader(); let held_ = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held_ += value; const parts = held_.split("\n\n"); held_ = parts.pop();
    for (const part of parts) if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}
const HOW = { stop: "complete", length: "cut at the limit", tool_calls: "tool call" };
/* Answer the message at the end of the branch. begun, tokens: what the answer goes on from. */
async function answer(begun = "", tokens = []) {
  const mine = talk, reply = live = new Reply($("model").value, begun, tokens);
  reply.node = Object.assign(talk.add({ role: "assistant", content: begun, model: $("model").value }), { reply });
  $("log").append(reply.root); running = new AbortController(); state(); say("Answering");
  let how = "", bad = false;
  $("log").scrollTop = $("log").scrollHeight;
  try {
    const answer = await fetch("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(request(begun)), signal: running.signal });
    if (!answer.ok) throw new Error(await reason(answer));
    for await (const event of events(answer.body)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) { reply.take(choice); if (choice.finish_reason) how = HOW[choice.finish_reason] || choice.finish_reason; }
    }
    if (!how) { how = "the connection broke off"; bad = true; }
  } catch (error) { bad = error.name !== "AbortError"; how = bad ? error.message : "stopped"; }
  if (live !== reply || talk !== mine) return; // another conversation is shown by now; this one was kept when it was left
  reply.node.how = how; reply.end(how, bad); keep(); running = live = null; state();
  say(bad ? how : `Answer: ${reply.text}`);
  $("prompt").focus({ preventScroll: true });
}
function ask(content, files_, parent) {
  $("empty")?.remove();
  const node = talk.add({ role: "user", content, files: files_?.length ? files_ : undefined }, parent ?? talk.leaf);
  if (parent === undefined) $("log").append(bubble(node)); else draw();
  keep(); answer();
}
/* An answer beside another one. */
function branchOff(reply, begun, tokens) {
  if (running) return;
  talk.leaf = reply.node.parent; draw(); answer(begun, tokens);
}
function again(reply) { branchOff(reply, "", []); }
function bubble(node) {
  const box = make("article", "turn user"), tools = make("div", "tools"), chips = make("div", "chips");
  box.setAttribute("aria-label", "Your message");
  if (node.content) box.append(make("div", "bubble", node.content));
  for (const f of node.files || []) chips.append(make("span", "chip", `${f.name}, ${size(f.text)}`));
  button(tools, "edit", () => edit(node, box), "edit message").className = "plain";
  button(tools, "copy", e => copy(whole(node), e.currentTarget), "copy message").className = "plain";
  versions(tools, node); box.append(chips, tools);
  return box;
}
const size = text => text.length < 1000 ? `${text.length} characters` : `${Math.round(text.length / 1000)} k characters`;
/* A message can be written anew, beside the one that was. */
function edit(node, box) {
  if (running || box.querySelector("textarea")) return;
  const area = make("textarea"), tools = box.querySelector(".tools"), old = [...tools.children], shown = box.querySelector(".bubble");
  area.value = node.content; area.setAttribute("aria-label", "Edit message"); shown ? shown.replaceWith(area) : box.prepend(area); tools.replaceChildren();
  const close = () => { shown ? area.replaceWith(shown) : area.remove(); tools.replaceChildren(...old); old[0].focus(); };
  const done = () => { const text = area.value.trim(); if (!running && (text || node.files)) ask(text, node.files, node.parent); };
  for (const [name, run] of [["cancel", close], ["send", done]]) button(tools, name, run).className = "plain seen";
  area.onkeydown = e => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); done(); } else if (e.key === "Escape") { e.stopPropagation(); close(); } };
  area.focus();
}

/* Text files that go with the next message. */
async function attach(found) {
  note("");
  for (const file of found) {
    if (file.size > 1e6) { note(`${file.name} has more than 1 MB`); continue; }
    try { files.push({ name: file.name, text: new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()).replace(/\n$/, "") }); } catch { note(`${file.name} is not UTF-8 text`); }
  }
  $("file").value = ""; attached(); $("prompt").focus();
}
function attached() {
  $("files").replaceChildren(...files.map(f => {
    const chip = make("span", "chip", `${f.name}, ${size(f.text)}`);
    button(chip, "✕", () => { files = files.filter(other => other !== f); attached(); }, `Remove ${f.name}`);
    return chip;
  }));
}
function note(text) { $("note").hidden = !text; $("note").textContent = text; }
function notice(text) { $("empty")?.remove(); $("log").append(make("div", "turn error", text)); say(text); }
function state() {
  const b = $("send"); b.replaceChildren(icon(running ? "stop" : "send")); b.classList.toggle("stop", !!running);
  b.setAttribute("aria-label", running ? "Stop" : "Send");
}
function fresh() {
  leave(); talk = new Talk(); files = []; attached(); remember(""); list(); tip(null);
  const box = make("div"), ideas = make("div", "ideas"); box.id = "empty";
  box.append(make("h2", "", "What shall we talk about?"), make("div", "", "The model runs on this machine; nothing leaves it."), ideas);
  for (const idea of ["Why is the sky blue?", "Write a haiku about rivers", "Explain recursion to a child"])
    button(ideas, idea, () => { if (!running && !$("send").disabled) ask(idea); }).className = "button";
  $("log").replaceChildren(box); $("prompt").focus();
}
function grow() { const p = $("prompt"); p.style.height = "auto"; p.style.height = `${p.scrollHeight}px`; }

$("form").onsubmit = e => {
  e.preventDefault();
  if (running) { running.abort(); return; }
  const text = $("prompt").value.trim(), sent = files;
  if (!text && !sent.length || $("send").disabled) return;
  $("prompt").value = ""; grow(); files = []; attached(); note(""); ask(text, sent);
};
$("prompt").oninput = grow;
$("prompt").onkeydown = e => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); if (!running) $("form").requestSubmit(); } };
addEventListener("keydown", e => {
  if (e.key !== "Escape") return;
  if (document.body.classList.contains("open")) drawer(false); else if ($("tip").hidden) running?.abort();
  tip(null);
});
/* On a narrow screen the panel lies over the rest, which cannot be reached meanwhile. */
function drawer(open) {
  const was = document.body.classList.toggle("open", open);
  $("gear").setAttribute("aria-expanded", open); $("main").inert = open;
  if (was) $("new").blur(), $("settings").focus(); else $("prompt").focus();
}
$("gear").onclick = () => drawer(!document.body.classList.contains("open"));
$("done").onclick = () => { drawer(false); $("gear").focus(); };
$("shade").onclick = () => drawer(false);
$("new").onclick = fresh;
$("attach").onclick = () => $("file").click();
$("file").onchange = () => attach([...$("file").files]);
for (const kind of ["dragover", "dragleave", "drop"]) addEventListener(kind, e => {
  if (![...e.dataTransfer.types].includes("Files")) return;
  e.preventDefault(); document.body.classList.toggle("drag", kind === "dragover");
  if (kind === "drop") attach([...e.dataTransfer.files]);
});
addEventListener("pagehide", () => { if (live) { live.node.how = "interrupted"; keep(); } });
addEventListener("storage", e => { if (e.key?.startsWith(CHAT)) list(); });
document.querySelectorAll("aside input, aside textarea, header select").forEach(e => e.addEventListener("input", save));
$("tint").addEventListener("input", () => talk.nodes.forEach(node => node.reply?.paint(true)));
$("model").addEventListener("input", watch);
state();
{ const id = recall(); if (Talk.read(id)) visit(id); else fresh(); }
models(load()).then(watch); setInterval(watch, 2000);
