/* Markdown to places in its text: blocks, each with the ranges of text that are its content, and runs inside a line.
   Nothing is made of HTML, so the text of a model is text; ranges are kept so that every token can be found again. */

/* Blocks of some lines. A line is { start, end }, a part of the text without its line end.
   A block is { kind, lines, start, end } with what its kind needs: level, language, items (lists of blocks), rows. */
function linesOf(text) {
  const found = []; let start = 0;
  for (const line of text.split("\n")) { found.push({ start, end: start + line.length }); start += line.length + 1; }
  return found;
}
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/, HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*\s*$/, RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)/, QUOTE = /^ {0,3}> ?/, MATH = /^\s*(\$\$|\\\[)/, DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

function blocks(text, lines = linesOf(text), depth = 0) {
  const found = [], said = line => text.slice(line.start, line.end);
  const after = (line, count) => ({ start: Math.min(line.end, line.start + count), end: line.end });
  let at = 0;
  const take = (kind, begin, more) => { const own = lines.slice(begin, at); found.push({ kind, lines: own, start: own[0].start, end: own[own.length - 1].end, ...more }); };
  while (at < lines.length) {
    const line = said(lines[at]), begin = at; let m;
    if (!line.trim()) { at++; continue; }
    if ((m = FENCE.exec(line))) {
      const close = new RegExp(`^ {0,3}${m[1][0] === "`" ? "`" : "~"}{${m[1].length},}\\s*$`);
      for (at++; at < lines.length && !close.test(said(lines[at])); at++);
      const inside = lines.slice(begin + 1, at); at = Math.min(at + 1, lines.length);
      take("pre", begin, { language: m[2], inside });
    } else if ((m = MATH.exec(line))) {
      const close = m[1] === "$$" ? "$$" : "\\]", rest = line.slice(m[0].length);
      at++;
      if (!rest.includes(close)) { while (at < lines.length && !said(lines[at]).includes(close)) at++; if (at === lines.length) { at = begin + 1; take("p", begin); continue; } at++; }
      const own = lines.slice(begin, at).map(said).join("\n"), from = own.indexOf(m[1]) + 2;
      const until = own.indexOf(close, from);
      if (own.slice(until + 2).trim()) { at = begin + 1; take("p", begin); } else take("math", begin, { formula: own.slice(from, until) });
    } else if ((m = HEADING.exec(line))) {
      at++; const from = line.indexOf(m[2], m[1].length);
      take("h", begin, { level: m[1].length, inside: [{ start: lines[begin].start + from, end: lines[begin].start + from + m[2].length }] });
    } else if (RULE.test(line)) { at++; take("hr", begin); }
    else if (QUOTE.test(line) && depth < 5) {
      const inside = [];
      while (at < lines.length && (m = QUOTE.exec(said(lines[at])))) inside.push(after(lines[at++], m[0].length));
      take("quote", begin, { blocks: blocks(text, inside, depth + 1) });
    } else if ((m = ITEM.exec(line)) && depth < 5) {
      const ordered = /\d/.test(m[2]), base = m[1].length, items = []; let indent = 0;
      const item = line => { const mark = ITEM.exec(line); return mark && /\d/.test(mark[2]) === ordered && !RULE.test(line) && mark[1].length < base + 2 ? mark : null; };
      while (at < lines.length) {
        const next = said(lines[at]), mark = item(next), last = items[items.length - 1];
        if (mark) { indent = mark[0].length; items.push([after(lines[at++], indent)]); continue; }
        if (!next.trim()) {
          const then = lines.slice(at + 1).find(line => said(line).trim());
          if (!then || !/^( {2}|\t)/.test(said(then)) && !item(said(then))) break;
        } else if (!/^( {2}|\t)/.test(next) && (starts(next) || !said(lines[at - 1]).trim())) break;
        last.push(after(lines[at++], Math.min(indent, next.length - next.trimStart().length)));
      }
      take("list", begin, { ordered, first: ordered ? parseInt(m[2]) : 1, items: items.map(item => blocks(text, item, depth + 1)) });
    } else if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(said(lines[at + 1])) && said(lines[at + 1]).includes("-") && said(lines[at + 1]).includes("|")) {
      const align = cells(text, lines[at + 1]).map(c => { const s = said(c); return s.endsWith(":") ? s.startsWith(":") ? "center" : "right" : "left"; });
      const rows = [cells(text, lines[at])];
      for (at += 2; at < lines.length && said(lines[at]).includes("|"); at++) rows.push(cells(text, lines[at]));
      take("table", begin, { rows, align });
    } else {
      for (at++; at < lines.length && said(lines[at]).trim() && !starts(said(lines[at])); at++);
      take("p", begin);
    }
  }
  return found;
}
/* Whether a line ends the paragraph above it. */
const starts = line => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || /^ {0,3}([-*+]|1[.)]) +\S/.test(line) || /^\s*(\$\$|\\\[)/.test(line);
function cells(text, line) {
  const found = []; let start = line.start, code = false;
  for (let at = line.start; at <= line.end; at++) {
    if (text[at] === "`") code = !code;
    if (at === line.end || text[at] === "|" && !code && text[at - 1] !== "\\") { found.push({ start, end: at }); start = at + 1; }
  }
  const trim = ({ start, end }) => { while (start < end && /\s/.test(text[start])) start++; while (end > start && /\s/.test(text[end - 1])) end--; return { start, end }; };
  if (found.length && !text.slice(found[0].start, found[0].end).trim()) found.shift();
  if (found.length && !text.slice(found[found.length - 1].start, found[found.length - 1].end).trim()) found.pop();
  return found.map(trim);
}

/* Runs of some lines: { kind, start, end } in the text, with `runs` inside strong, em, del and a; kind "" is plain. */
const MARK = /(`+)(?!`)([^`]|[^`][\s\S]*?[^`])\1(?!`)|\$\$([^$]+)\$\$|\\\[([\s\S]+?)\\\]|\\\(([\s\S]+?)\\\)|\$(?![\s$\d][^$]*\$\d)(?!\s)((?:\\.|[^$\n\\])+?)(?<![\s\\])\$(?!\d)|\[([^\]\n]+)\]\((https?:\/\/[^\s)]+|mailto:[^\s)]+)\)|\*\*(?=\S)([\s\S]+?)(?<=\S)\*\*|__(?=\S)([\s\S]+?)(?<=\S)__(?!\w)|(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?!\*)|(?<![\w_])_(?=[^\s_])([^_]+?)(?<=\S)_(?![\w_])|~~(?=\S)([\s\S]+?)~~|\\([\\`*_{}\[\]()#+.!~|>$-])/g;
function runs(text, start, end, depth = 0) {
  const found = [], part = text.slice(start, end); let at = 0;
  const plain = (a, b) => { if (b > a) found.push({ kind: "", start: start + a, end: start + b }); };
  for (const m of part.matchAll(MARK)) {
    const formula = m[3] ?? m[4] ?? m[5] ?? m[6], inner = (text_, kind, more) => {
      const from = start + m.index + m[0].indexOf(text_, kind === "a" || kind === "" ? 1 : 0);
      return { kind, start: from, end: from + text_.length, ...more };
    };
    plain(at, m.index); at = m.index + m[0].length;
    if (m[2] !== undefined) { const from = start + m.index + m[1].length; found.push({ kind: "code", start: from, end: from + m[2].length }); }
    else if (formula !== undefined) found.push({ kind: "math", start: start + m.index, end: start + at, formula, wide: (m[3] ?? m[4]) !== undefined });
    else if (m[7] !== undefined) found.push(inner(m[7], "a", { to: m[8] }));
    else if (m[9] ?? m[10]) found.push(inner(m[9] ?? m[10], "strong"));
    else if (m[11] ?? m[12]) found.push(inner(m[11] ?? m[12], "em"));
    else if (m[13]) found.push(inner(m[13], "del"));
    else found.push({ kind: "", start: start + m.index + 1, end: start + at });
  }
  plain(at, part.length);
  if (depth < 4) for (const run of found) if (["strong", "em", "del", "a"].includes(run.kind)) run.runs = runs(text, run.start, run.end, depth + 1);
  return found;
}
