/* The engine from inside: four views, each drawn from the JSON of one route. */
const $ = id => document.getElementById(id);
const make = (tag, name, text) => { const e = document.createElement(tag); if (name) e.className = name; if (text !== undefined) e.textContent = text; return e; };
const draw = (tag, attributes, ...inside) => {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...inside); return e;
};
/* A drawing with a text for those who do not see it. */
const picture = (width, height, label, ...inside) => draw("svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img", "aria-label": label }, draw("title", {}, label), ...inside);
const number = (x, digits = 3) => x === 0 ? "0" : Math.abs(x) >= 1000 || Math.abs(x) < .001 ? x.toExponential(digits - 1) : x.toPrecision(digits);
const size = bytes => bytes >= 1e9 ? `${(bytes / 1e9).toFixed(1)} GB` : bytes >= 1e6 ? `${(bytes / 1e6).toFixed(1)} MB` : `${(bytes / 1e3).toFixed(1)} kB`;
let shown = "";

async function ask(route, query = {}) {
  const answer = await fetch(`${route}?${new URLSearchParams({ ...($("model").value ? { model: $("model").value } : {}), ...query })}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error?.message || `the service answered ${answer.status}`);
  return found;
}
/* Do something of a view; what goes wrong is said. */
async function tried(work) {
  try { await work(); $("wrong").hidden = true; } catch (error) { $("wrong").textContent = error.message; $("wrong").hidden = false; }
}
function table(heads, rows) {
  const made = make("table"), first = make("tr");
  for (const head of heads) { const th = make("th", "", head); th.scope = "col"; first.append(th); }
  made.append(first, ...rows.map(row => { const tr = make("tr"); tr.append(...row.map(cell => make("td", "", cell))); return tr; }));
  return made;
}

/* KV blocks, again and again while they are looked at. */
async function kv() {
  const found = await ask("explore/kv"), { counts } = found, pool = found.pools[0];
  $("kv-facts").textContent = `${pool.used} of ${pool.capacity} blocks of ${found.block_tokens} tokens are in use, ${pool.kept} more are cached; ` +
    `${counts.copied_blocks} copied, ${found.evicted} evicted, ${counts.swaps} swaps, ${counts.prefix_tokens} of ${counts.prompt_tokens} prompt tokens from the prefix cache.`;
  $("kv-pools").replaceChildren(...found.pools.map((one, at) => {
    const box = make("div"), blocks = make("div", "blocks");
    const shared = one.blocks.filter(n => n > 1).length;
    box.append(make("h2", "", at || one.window ? `Blocks of a window of ${one.window} tokens` : "Blocks"));
    blocks.setAttribute("role", "img"); blocks.setAttribute("aria-label", `${one.used} in use, ${shared} of them shared, ${one.kept} cached, ${one.capacity} in all`);
    one.blocks.forEach((n, block) => {
      const cell = make("i", n > 1 ? "many" : n === 1 ? "one" : n < 0 ? "kept" : "free");
      cell.title = `block ${block}: ${n > 1 ? `shared by ${n}` : n === 1 ? "in use" : n < 0 ? "cached" : "free"}`; cell.dataset.block = block; blocks.append(cell);
    });
    box.append(blocks); return box;
  }));
  $("kv-requests").replaceChildren(found.requests.length ? table(["request", "state", "prompt", "cached", "sequences", "tokens", "blocks"], found.requests.map(r => [
    `${r.number}`, r.running ? "runs" : r.sequences.some(s => s.swapped) ? "swapped out" : "waits", `${r.prompt}`, `${r.reused}`, `${r.sequences.length}`,
    r.sequences.map(s => s.tokens).join(" "), r.sequences.map(s => s.blocks.length).join(" ")])) : make("p", "soft", "No request runs."));
  const rows = [...$("kv-requests").querySelectorAll("tr")].slice(1);
  rows.forEach((row, at) => {
    row.tabIndex = 0;
    const mark = on => { const own = new Set(on ? found.requests[at].sequences.flatMap(s => s.blocks) : []); for (const cell of $("kv-pools").querySelectorAll("div:first-child i")) cell.classList.toggle("on", own.has(+cell.dataset.block)); };
    row.onpointerenter = row.onfocus = () => mark(true); row.onpointerleave = row.onblur = () => mark(false);
  });
  tree(found.tree, found.tree_in_all);
}
function tree(nodes, all) {
  if (!nodes.length) { $("kv-tree").replaceChildren(make("p", "soft", "The prefix cache is empty.")); return; }
  const places = new Map(), known = new Set(nodes.map(n => n.node)), below = new Map(); let row = 0, deep = 0;
  for (const n of nodes) { const at = known.has(n.before) ? n.before : 0; below.set(at, [...(below.get(at) || []), n]); }
  const order = (below.get(0) || []).map(node => [node, 0]).reverse();
  while (order.length) { // depth first, each child but the first in a row of its own
    const [node, depth] = order.pop(); deep = Math.max(deep, depth);
    if (places.size && ![...places.values()].some(p => p.row === row && p.depth === depth - 1 && p.node.node === node.before && !p.used)) row++;
    if (places.has(node.before)) places.get(node.before).used = true;
    places.set(node.node, { node, depth, row });
    for (const child of (below.get(node.node) || []).slice().reverse()) order.push([child, depth + 1]);
  }
  const x = p => 16 + 26 * p.depth, y = p => 16 + 24 * p.row, lines = [], dots = [];
  for (const p of places.values()) {
    const from = places.get(p.node.before);
    if (from) lines.push(draw("path", { class: "link", d: `M${x(from)} ${y(from)} V${y(p)} H${x(p)}` }));
    dots.push(draw("circle", { class: p.node.held ? "node held" : "node", cx: x(p), cy: y(p), r: 7 }, draw("title", {}, p.node.block < 0 ? "evicted" : `block ${p.node.block}, ${p.node.held ? `in use by ${p.node.held}` : "cached"}`)));
  }
  const drawing = picture(32 + 26 * deep, 32 + 24 * row, `${all} blocks in ${(below.get(0) || []).length} prefixes`, ...lines, ...dots);
  drawing.setAttribute("width", 32 + 26 * deep);
  $("kv-tree").replaceChildren(drawing);
}

/* A tensor under a scheme. */
async function quantisation() {
  if (!$("tensor").options.length) {
    const { tensors, schemes } = await ask("explore/quantisation");
    $("tensor").replaceChildren(...tensors.map(t => new Option(`${t.name} ${t.shape.join("×")} ${t.type}`, t.name)));
    $("scheme").replaceChildren(...schemes.map(s => new Option(`${s.name}, ${s.bits.toFixed(2)} bits, ${s.levels} levels`, s.name)));
    $("scheme").value = "q3h";
  }
  if (!$("tensor").value) throw new Error("This model's files have no matrix with rows of whole blocks.");
  const found = await ask("explore/quantisation", { tensor: $("tensor").value, scheme: $("scheme").value, row: $("row").value || 0 }), { block } = found;
  $("quantisation-facts").textContent = `${found.bits.toFixed(2)} bits per weight; rms of the error ${number(found.rms_error)}, ${(100 * found.rms_error / found.rms).toFixed(2)} % of the weights' ${number(found.rms)}; ` +
    `largest ${number(found.max_error)}. Rows ${found.rows[0]} to ${found.rows[1] - 1}, stored as ${found.type}.`;
  $("values").replaceChildren(histogram(found.values, "Histogram of the weights")); $("errors").replaceChildren(histogram(found.errors, "Histogram of the errors"));
  $("block").replaceChildren(weights(block));
  $("pairs").replaceChildren();
  if (!block.codes) return;
  $("pairs").append(make("p", "", `weight = scale × (code − zero), with ${block.levels} levels: scale ${number(block.scale, 5)}, zero ${number(block.zero, 5)}. Codes: ${block.codes.join(" ")}`));
  if (block.pairs) {
    $("pairs").append(make("p", "", "Two weights share seven bits, as first + 11 × second:"));
    block.pairs.forEach((pair, at) => $("pairs").append(make("span", "bits", `${block.codes[2 * at]} + 11·${block.codes[2 * at + 1]} = ${pair.code} = ${pair.bits}`)));
  }
}
function histogram({ from, to, counts }, label) {
  const top = Math.max(...counts, 1), width = 480 / counts.length;
  return picture(480, 170, label, ...counts.map((n, at) => draw("rect", { class: "bar", x: at * width, y: 140 - 130 * n / top, width: width - 1, height: 130 * n / top }, draw("title", {}, `${n}`))),
    draw("line", { class: "axis", x1: 0, x2: 480, y1: 140, y2: 140 }), draw("text", { x: 2, y: 158 }, number(from)), draw("text", { x: 478, y: 158, "text-anchor": "end" }, number(to)), draw("text", { x: 240, y: 158, "text-anchor": "middle" }, "0"));
}
function weights({ weights: stored, decoded }) {
  const top = Math.max(...[...stored, ...decoded].map(Math.abs), 1e-30), x = at => 12 + 22 * at, y = v => 80 - 70 * v / top;
  return picture(720, 160, "Original and quantised weights", draw("line", { class: "axis", x1: 0, x2: 720, y1: 80, y2: 80 }),
    draw("polyline", { class: "line", points: stored.map((v, at) => `${x(at)},${y(v)}`).join(" ") }), ...decoded.map((v, at) => draw("circle", { class: "dot", cx: x(at), cy: y(v), r: 3.5 }, draw("title", {}, `${number(stored[at], 5)} becomes ${number(v, 5)}`))));
}

/* The machine's limits, and ops below them. */
async function roofline() {
  $("roofline-facts").textContent = "measuring …";
  let found;
  try { found = await ask("explore/roofline"); } catch (error) { $("roofline-facts").textContent = ""; throw error; }
  const { limits, last_request: last, token, prompt } = found;
  $("roofline-facts").textContent = `Memory ${limits.read_gb_s.toFixed(1)} GB/s, int8 ${limits.int8_gop_s.toFixed(0)} and float32 ${limits.f32_gop_s.toFixed(0)} 10⁹ operations/s, ${limits.threads} threads. ` +
    `The last request had ${last.prompt} prompt tokens and ${last.new} new tokens. Below: decoding a token after ${token.context} tokens, and a prompt of ${prompt.tokens} tokens.`;
  const points = [...token.ops.map(op => ({ ...op, kind: "token" })), ...prompt.ops.map(op => ({ ...op, kind: "prompt" }))].filter(op => op.gop_s > 0 && op.megabytes > 0)
    .map(op => ({ ...op, ops: op.gop_s / op.gb_s })); // operations per byte
  const low = -2, high = 4, least = -2, most = Math.log10(limits.int8_gop_s) + .4, x = v => 50 + 640 * (Math.log10(v) - low) / (high - low), y = v => 300 - 280 * (Math.log10(v) - least) / (most - least);
  const roof = limit => { const knee = limit / limits.read_gb_s; return draw("polyline", { class: "roof", points: [[10 ** low, limits.read_gb_s * 10 ** low], [knee, limit], [10 ** high, limit]].map(([a, b]) => `${x(a)},${y(b)}`).join(" ") }); };
  const inside = p => Math.max(52, Math.min(690, x(p.ops)));
  $("roofline-plot").replaceChildren(picture(720, 340, "Speed of ops below the limits of memory and of the processor", roof(limits.int8_gop_s), roof(limits.f32_gop_s),
    ...points.map(p => draw("circle", { class: p.kind === "prompt" ? "dot prompt" : "dot", cx: inside(p), cy: Math.max(10, Math.min(300, y(p.gop_s))), r: 5 }, draw("title", {}, `${p.op}, ${p.kind}: ${number(p.gop_s)} 10⁹/s at ${number(p.ops)} operations per byte`))),
    draw("line", { class: "axis", x1: 50, x2: 690, y1: 300, y2: 300 }), ...[-2, 0, 2, 4].map(e => draw("text", { x: x(10 ** e), y: 318, "text-anchor": "middle" }, `${10 ** e}`)),
    ...[-1, 0, 1, 2, 3].filter(e => e < most).map(e => draw("text", { x: 44, y: y(10 ** e) + 4, "text-anchor": "end" }, `${10 ** e}`)), draw("text", { x: 690, y: 335, "text-anchor": "end" }, "operations per byte"), draw("text", { x: 54, y: 14 }, "10⁹ operations per second; filled: a token, open: a prompt")));
  $("roofline-table").replaceChildren(...[["A token", token], ["A prompt", prompt]].flatMap(([name, part]) => [make("h2", "", name), table(["op", "steps", "µs", "share", "MB", "GB/s", "10⁹/s", "of the limit"],
    part.ops.map(op => [op.op, `${op.steps}`, op.microseconds.toFixed(1), `${(100 * op.share).toFixed(1)} %`, number(op.megabytes), number(op.gb_s), number(op.gop_s), op.at_limit === null ? "" : `${(100 * op.at_limit).toFixed(0)} %`]))]));
}

/* Devices at work. */
let clusters = [];
const slid = id => id === "context" && $(id).value === "0" ? 0 : 2 ** $(id).value;
async function timeline() {
  if (!clusters.length) {
    ({ clusters } = await ask("explore/timeline"));
    $("cluster").replaceChildren(...clusters.map(c => new Option(c.title, c.name)));
    ways();
  }
  for (const id of ["batch", "tokens", "context"]) $(id).parentElement.querySelector("output").textContent = slid(id);
  const found = await ask("explore/timeline", { cluster: $("cluster").value, devices: $("devices").value, batch: slid("batch"), tokens: slid("tokens"), context: slid("context") });
  const full = found.devices.filter(name => found.memory[name].used > found.memory[name].limit);
  $("timeline-facts").textContent = `${number(found.tokens_per_second)} tokens/s, ${number(1000 * found.seconds / 2)} ms a batch; devices compute ${(100 * found.shares.work).toFixed(0)} % of the time, communicate ${(100 * found.shares.exchange).toFixed(0)} %. ` +
    found.devices.map(name => `${name}: ${size(found.memory[name].used)} of ${size(found.memory[name].limit)}`).join(", ") + (full.length ? `. Does not fit: ${full.join(", ")}` : "");
  const x = t => 60 + 640 * t / found.seconds, rows = new Map(found.devices.map((name, at) => [name, at]));
  $("timeline-plot").replaceChildren(picture(720, 30 + 30 * rows.size, `${found.devices.length} devices over ${number(1000 * found.seconds)} ms`,
    ...found.devices.map((name, at) => draw("text", { x: 52, y: 26 + 30 * at, "text-anchor": "end" }, name)),
    ...found.intervals.map(([device, begin, end, what, job]) => draw("rect", { class: what, x: x(begin), y: 10 + 30 * rows.get(device), width: Math.max(.4, x(end) - x(begin)), height: 22, opacity: job % 2 ? .7 : 1 }, draw("title", {}, `${device}, batch ${job + 1}: ${what}, ${number(1e6 * (end - begin))} µs`))),
    draw("text", { x: 60, y: 25 + 30 * rows.size }, "0"), draw("text", { x: 700, y: 25 + 30 * rows.size, "text-anchor": "end" }, `${number(1000 * found.seconds)} ms`)));
}
function ways() {
  const found = clusters.find(c => c.name === $("cluster").value);
  $("ways").replaceChildren(...found.ways.map(way => new Option(way, way))); $("devices").value = found.ways[found.ways.length - 1];
}

/* Views as tabs: one is shown, arrow keys go from one to the next. */
const VIEWS = { kv, quantisation, roofline: async () => {}, timeline };
function open(name) {
  shown = name;
  for (const view of Object.keys(VIEWS)) {
    $(view).hidden = view !== name; const tab = $(`tab-${view}`);
    tab.setAttribute("aria-selected", view === name); tab.tabIndex = view === name ? 0 : -1;
  }
  history.replaceState(null, "", `#${name}`);
  return tried(VIEWS[name]);
}
const names = Object.keys(VIEWS);
for (const name of names) $(`tab-${name}`).onclick = () => open(name);
document.querySelector("nav").onkeydown = e => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[e.key];
  if (step) { const next = names[(names.indexOf(shown) + step + names.length) % names.length]; open(next); $(`tab-${next}`).focus(); }
};
$("quantisation-form").onchange = () => tried(quantisation);
$("quantisation-form").onsubmit = $("timeline-form").onsubmit = e => e.preventDefault();
$("timeline-form").onchange = e => { if (e.target.id === "cluster") ways(); tried(timeline); };
$("measure").onclick = () => tried(roofline);
$("model").onchange = () => { $("tensor").replaceChildren(); open(shown); };
setInterval(() => { if (shown === "kv" && !document.hidden) tried(kv); }, 700);
tried(async () => {
  const answer = await fetch("v1/models"), found = await answer.json();
  if (!answer.ok) throw new Error(found.error?.message || `the service answered ${answer.status}`);
  $("model").append(...found.data.filter(m => m.loaded && (m.capabilities || []).includes("completion")).map(m => new Option(m.id, m.id)));
  await open(names.includes(location.hash.slice(1)) ? location.hash.slice(1) : "kv");
});
