/* One answer: text of several tokens, each with its alternatives, drawn as Markdown while it comes. */
const $ = id => document.getElementById(id);
const make = (tag, name, text) => { const e = document.createElement(tag); if (name) e.className = name; if (text) e.textContent = text; return e; };
const icon = name => $(`icon-${name}`).content.firstElementChild.cloneNode(true);
function button(where, text, run, label) {
  const b = make("button", "", text); b.type = "button"; b.onclick = run;
  if (label) b.setAttribute("aria-label", label);
  where.append(b); return b;
}
/* Say something to those who hear the page. */
function say(text) { $("say").textContent = text; }

class Reply {
  /* text, tokens: those that the answer goes on from. */
  constructor(model, text = "", tokens = []) {
    this.model = model; this.text = text; this.thinking = ""; this.tokens = tokens; this.begin = performance.now();
    this.first = 0; this.last = 0; this.count = 0; this.how = ""; this.painted = [];
    this.root = make("article", "turn reply"); this.root.setAttribute("aria-label", model ? `Answer of ${model}` : "Answer");
    this.think = make("details", "think"); this.think.hidden = true;
    this.thoughts = make("div"); this.think.append(make("summary", "", "Thinking"), this.thoughts);
    this.body = make("div", "text caret"); this.foot = make("div", "foot");
    this.root.append(this.think, this.body, this.foot); this.body.reply = this;
  }
  take(choice) {
    const now = performance.now(), delta = choice.delta || {};
    const entries = choice.logprobs ? choice.logprobs.content || [] : [];
    if (!this.first && (delta.content || delta.reasoning_content || entries.length)) this.first = now;
    this.last = now; this.count += entries.length || (delta.content || delta.reasoning_content ? 1 : 0);
    if (delta.reasoning_content) this.thinking += delta.reasoning_content;
    if (delta.content) { this.text += delta.content; this.tokens.push({ end: this.text.length, entries }); }
    for (const c of delta.tool_calls || []) this.text += `${c.function.name || ""}${c.function.arguments || ""}`;
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paint());
  }
  /* An answer of an earlier visit: its text alone. */
  restored({ content, thinking, how }) {
    this.text = content; this.thinking = thinking || ""; this.tokens = [{ end: content.length, entries: [] }];
    this.end(how || "", false); return this;
  }
  paint(anew = false) {
    this.frame = 0;
    const log = $("log"), low = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    this.think.hidden = !this.thinking; this.thoughts.textContent = this.thinking;
    if (!this.ended) this.think.firstChild.textContent = this.text ? "Thought" : "Thinking …";
    const found = blocks(this.text), kept = anew ? [] : this.painted;
    /* A block but the last one changes no more: what was drawn of it stays. */
    this.painted = found.map((block, at) => {
      const key = `${block.kind}:${block.start}:${block.end}`, old = kept[at];
      return old && old.key === key && !old.last ? old : { key, last: at >= found.length - 2, node: this.block(block) };
    });
    const nodes = this.painted.map(p => p.node);
    nodes.forEach((node, at) => { if (this.body.childNodes[at] !== node) this.body.insertBefore(node, this.body.childNodes[at] || null); });
    while (this.body.childNodes.length > nodes.length) this.body.lastChild.remove();
    this.stats();
    if (low) log.scrollTop = log.scrollHeight;
  }
  block(b) {
    if (b.kind === "pre") return this.code(b);
    if (b.kind === "hr") return make("hr");
    if (b.kind === "math") { const box = make("div", "formula"); box.append(formula(b.formula, true)); return box; }
    if (b.kind === "h") { const box = make(`h${Math.min(6, b.level + 1)}`); box.append(...this.lines(b.inside)); return box; }
    if (b.kind === "quote") { const box = make("blockquote"); box.append(...b.blocks.map(one => this.block(one))); return box; }
    if (b.kind === "list") {
      const box = make(b.ordered ? "ol" : "ul");
      if (b.ordered && b.first !== 1) box.start = b.first;
      for (const item of b.items) {
        const li = make("li");
        li.append(...item.flatMap(one => one.kind === "p" ? this.lines(one.lines) : [this.block(one)])); box.append(li);
      }
      return box;
    }
    if (b.kind === "table") return this.table(b);
    const box = make("p"); box.append(...this.lines(b.lines)); return box;
  }
  code({ inside, language }) {
    const box = make("div", "code"), pre = make("pre"), code = make("code");
    inside.forEach((line, at) => { if (at) code.append("\n"); code.append(...this.spans(line.start, line.end)); });
    pre.append(code); pre.tabIndex = 0; box.append(pre);
    if (language) { box.dataset.language = language; pre.setAttribute("aria-label", `Code, ${language}`); }
    if (this.ended) button(box, "copy", e => copy(inside.map(line => this.text.slice(line.start, line.end)).join("\n"), e.currentTarget), "copy code");
    return box;
  }
  table({ rows, align }) {
    const box = make("div", "table"), table = make("table");
    rows.forEach((row, at) => {
      const tr = make("tr");
      align.forEach((side, n) => {
        const cell = make(at ? "td" : "th"); cell.style.textAlign = side;
        if (!at) cell.scope = "col";
        if (row[n]) cell.append(...this.lines([row[n]]));
        tr.append(cell);
      });
      table.append(tr);
    });
    box.append(table); return box;
  }
  /* Lines one below the other; marks may go over their ends where the lines follow each other in the text. */
  lines(lines) {
    const parts = [];
    for (const line of lines) {
      const last = parts[parts.length - 1];
      if (last && last.end + 1 === line.start) last.end = line.end; else parts.push({ ...line });
    }
    return parts.flatMap((part, at) => [...(at ? [document.createTextNode("\n")] : []), ...runs(this.text, part.start, part.end).map(r => this.inline(r))]);
  }
  inline({ start, end, kind, runs: inside, formula: source, wide, to }) {
    const part = document.createDocumentFragment();
    if (kind === "math") { const box = make("span", "formula"); box.append(formula(source, wide)); return box; }
    const content = inside ? inside.map(r => this.inline(r)) : this.spans(start, end);
    if (!kind) { part.append(...content); return part; }
    const box = make(kind); box.append(...content);
    if (kind === "a") { box.href = to; box.rel = "noopener noreferrer"; box.target = "_blank"; box.title = to; }
    return box;
  }
  /* The text start..end as one element per token. */
  spans(start, end) {
    const found = []; let low = 0, high = this.tokens.length;
    while (low < high) { const middle = (low + high) >> 1; if (this.tokens[middle].end <= start) low = middle + 1; else high = middle; }
    for (let n = low, from = n ? this.tokens[n - 1].end : 0; n < this.tokens.length && from < end; n++) {
      const { end: to, entries } = this.tokens[n], a = Math.max(from, start), b = Math.min(to, end);
      from = to;
      if (a >= b) continue;
      const span = make("span", "t", this.text.slice(a, b));
      if (entries.length) {
        span.dataset.n = n; span.reply = this;
        const p = Math.exp(Math.min(...entries.map(e => e.logprob)));
        if ($("tint").checked && p < .9) span.style.background = `rgba(var(--warm),${(.42 * (1 - p)).toFixed(2)})`;
      }
      found.push(span);
    }
    return found;
  }
  stats(done = this.how) {
    const seconds = (this.last - this.first) / 1000, parts = [];
    if (this.first) parts.push(`${this.count} tokens`);
    if (this.count > 1 && seconds > 0) parts.push(`${((this.count - 1) / seconds).toFixed(1)} tokens/s`);
    if (this.first) parts.push(`first after ${((this.first - this.begin) / 1000).toFixed(2)} s`);
    if (done) parts.push(done);
    this.foot.replaceChildren(...parts.map(p => make("span", p === done && this.bad ? "error" : "", p)));
    if (!this.ended) return;
    button(this.foot, "copy", e => copy(this.text, e.currentTarget), "copy answer");
    button(this.foot, "again", () => again(this), "answer again");
    versions(this.foot, this.node);
  }
  end(how, bad) {
    this.ended = true; this.how = how; this.bad = bad; cancelAnimationFrame(this.frame); this.body.classList.remove("caret");
    if (this.tokens.some(token => token.entries.length)) { // words can be chosen by keys
      this.body.tabIndex = 0; this.body.setAttribute("role", "group");
      this.body.setAttribute("aria-label", "Text of the answer. Left and right go from word to word, Enter opens a word's alternatives.");
    }
    this.paint(true);
  }
}
async function copy(text, from) {
  try { await navigator.clipboard.writeText(text); } catch { /* not over plain HTTP: as browsers did before */
    const area = make("textarea"); area.value = text; document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
  }
  from.textContent = "copied"; say("copied"); setTimeout(() => { from.textContent = "copy"; }, 1500);
}
