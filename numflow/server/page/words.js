/* Alternatives of a word with their probabilities: under the mouse, or held open by a click, a finger or Enter, to go on
   from another word. */
const visible = text => text === "" ? "(nothing)" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
const percent = logprob => { const p = Math.exp(logprob); return `${(100 * p).toFixed(p < .0995 ? 2 : 1)} %`; };
let held = null; // the word whose alternatives stay open

function tip(span, hold = false) {
  for (const other of document.querySelectorAll(".t.on")) other.classList.remove("on");
  $("tip").hidden = !span; $("tip").classList.toggle("held", hold); held = span && hold ? span : null;
  if (!span) return;
  span.classList.add("on");
  const { reply } = span, n = +span.dataset.n, rows = [];
  reply.tokens[n].entries.forEach((entry, part) => {
    const all = entry.top_logprobs.slice();
    if (!all.some(t => t.token === entry.token && Math.abs(t.logprob - entry.logprob) < 1e-6)) all.push(entry);
    for (const t of all) rows.push({ ...t, part, mine: t.token === entry.token });
  });
  $("tip").setAttribute("aria-label", `Alternatives of ${visible(span.textContent)}`);
  $("tip").replaceChildren(...rows.map(t => {
    const row = make("button", t.mine ? "row mine" : "row"), bar = make("i");
    bar.style.width = `${(100 * Math.exp(t.logprob)).toFixed(1)}%`;
    row.type = "button"; row.tabIndex = hold ? 0 : -1; row.disabled = hold && (t.mine || t.special || t.token.startsWith("bytes:"));
    row.append(bar, make("code", "", visible(t.token)), make("span", "", percent(t.logprob)));
    row.setAttribute("aria-label", `${visible(t.token)}, ${percent(t.logprob)}${t.mine ? ", chosen" : ", go on from here"}`);
    row.onclick = () => { tip(null); goOn(reply, n, t.part, t); };
    return row;
  }), make("div", "row-hint", hold ? "Choose one to continue from it." : ""));
  const at = span.getBoundingClientRect(), box = $("tip").getBoundingClientRect();
  const below = at.bottom + 6 + box.height < innerHeight;
  $("tip").style.left = `${Math.max(8, Math.min(at.left, innerWidth - box.width - 8))}px`;
  $("tip").style.top = `${Math.max(8, below ? at.bottom + 6 : at.top - box.height - 6)}px`;
}
/* Write the answer anew from a word on: another one stands there. */
function goOn(reply, n, part, { token, logprob, bytes }) {
  const start = n ? reply.tokens[n - 1].end : 0, entries = reply.tokens[n].entries;
  const kept = entries.slice(0, part), text = kept.map(entry => entry.token).join("") + token;
  const chosen = { ...entries[part], token, logprob, bytes };
  branchOff(reply, reply.text.slice(0, start) + text, [...reply.tokens.slice(0, n), { end: start + text.length, entries: [...kept, chosen] }]);
}

/* By mouse and finger. */
$("log").addEventListener("pointerover", e => { if (!held) tip(e.target.closest(".t[data-n]")); });
$("log").addEventListener("pointerdown", e => tip(e.target.closest(".t[data-n]")));
$("log").addEventListener("click", e => {
  const span = e.target.closest(".t[data-n]");
  if (span && span.reply.ended && !String(getSelection())) tip(span, true);
});
$("log").addEventListener("pointerleave", e => { if (e.pointerType === "mouse" && !held) tip(null); }); // a finger that is lifted leaves too
$("log").addEventListener("scroll", () => tip(null));

/* By keys. */
$("log").addEventListener("keydown", e => {
  const { reply } = e.target, step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[e.key];
  if (!reply || e.altKey || e.ctrlKey || e.metaKey || !step && e.key !== "Enter") return;
  const words = [...reply.body.querySelectorAll(".t[data-n]")];
  if (!words.length) return;
  const at = words.findIndex(word => word.classList.contains("on"));
  e.preventDefault();
  if (step) {
    const word = words[Math.max(0, Math.min(words.length - 1, at < 0 ? (step > 0 && step < Infinity ? 0 : words.length - 1) : at + step))];
    word.scrollIntoView({ block: "nearest" });
    requestAnimationFrame(() => tip(word)); // scrolling hides it
    const [entry] = reply.tokens[word.dataset.n].entries;
    say(`${visible(word.textContent)}, ${percent(entry.logprob)}`);
  } else if (at >= 0) {
    tip(words[at], true);
    $("tip").querySelector("button:not(:disabled)")?.focus();
  }
});
$("tip").addEventListener("keydown", e => {
  const rows = [...$("tip").querySelectorAll("button:not(:disabled)")], step = { ArrowDown: 1, ArrowUp: -1 }[e.key];
  if (step) { e.preventDefault(); rows[(rows.indexOf(document.activeElement) + step + rows.length) % rows.length]?.focus(); }
  if (e.key === "Escape" || e.key === "Tab") {
    const body = held?.reply.body, word = held;
    e.preventDefault(); e.stopPropagation(); body?.focus(); tip(null); word?.classList.add("on");
  }
});
addEventListener("pointerdown", e => { if (held && !e.target.closest("#tip, .t[data-n]")) tip(null); });
