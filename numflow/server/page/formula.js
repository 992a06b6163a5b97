/* Formulas: the LaTeX that models write, to MathML, which browsers draw themselves. A command that is not known stays
   as it was written. */
const MATHML = "http://www.w3.org/1998/Math/MathML";
const SIGNS = Object.fromEntries((
  "alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ " +
  "phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ hbar ℏ ell ℓ emptyset ∅ Re ℜ Im ℑ " +
  "cdot ⋅ times × div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ otimes ⊗ odot ⊙ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ " +
  "in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ cup ∪ cap ∩ setminus ∖ land ∧ wedge ∧ lor ∨ vee ∨ neg ¬ lnot ¬ forall ∀ exists ∃ mid ∣ parallel ∥ perp ⟂ angle ∠ " +
  "to → rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ implies ⟹ iff ⟺ Leftarrow ⇐ Leftrightarrow ⇔ mapsto ↦ uparrow ↑ downarrow ↓ ldots … dots … cdots ⋯ vdots ⋮ ddots ⋱ " +
  "langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ lbrace { rbrace } vert | Vert ‖ prime ′ degree ° therefore ∴ because ∵ square □ checkmark ✓").split(" ")
  .reduce((pairs, word, at, all) => at % 2 ? pairs : [...pairs, [word, all[at + 1]]], []));
const LARGE = { sum: "∑", prod: "∏", coprod: "∐", int: "∫", iint: "∬", iiint: "∭", oint: "∮", bigcup: "⋃", bigcap: "⋂", bigoplus: "⨁", bigotimes: "⨂" };
const NAMES = new Set("sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp lim limsup liminf max min sup inf det dim ker gcd deg arg Pr argmax argmin softmax".split(" "));
const ACCENTS = { hat: "^", widehat: "^", bar: "¯", overline: "¯", vec: "→", dot: "˙", ddot: "¨", tilde: "~", widetilde: "~", overbrace: "⏞" };
const STYLES = { mathbf: "bold", boldsymbol: "bold", mathbb: "double", mathcal: "script", mathrm: "normal", operatorname: "normal", mathit: "", mathsf: "normal", mathtt: "normal" };
const SPACES = { ",": .17, ":": .22, ";": .28, "!": -.17, " ": .25, quad: 1, qquad: 2 };
const DOUBLE = { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" };

function formula(source, wide) {
  const tokens = source.match(/\\[a-zA-Z]+\*?|\\.|[{}^_&]|\d+(?:\.\d+)?|\s+|[\s\S]/g) || []; let at = 0, depth = 0;
  const e = (tag, ...inside) => { const made = document.createElementNS(MATHML, tag); made.append(...inside); return made; };
  const set = (made, attributes) => { for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value); return made; };
  const skip = () => { while (/^\s+$/.test(tokens[at] || "")) at++; };
  /* All up to a token that closes, as one element. */
  const row = closes => { const inside = many(closes); return inside.length === 1 ? inside[0] : e("mrow", ...inside); };
  const many = closes => {
    const inside = [];
    for (;;) {
      skip();
      if (at >= tokens.length || closes(tokens[at])) return inside;
      inside.push(scripted(atom()));
    }
  };
  const raw = () => { // the text of a group, as it stands
    skip();
    if (tokens[at] !== "{") return tokens[at++] || "";
    let text = "", open = 1; at++;
    while (at < tokens.length) { const t = tokens[at++]; if (t === "{") open++; if (t === "}" && --open === 0) break; text += t; }
    return text;
  };
  const group = () => {
    skip();
    if (tokens[at] !== "{") return at < tokens.length ? atom() : e("mrow");
    at++; const inside = row(t => t === "}"); at++; return inside;
  };
  const scripted = base => {
    let below = null, above = null; skip();
    while ((tokens[at] === "_" && !below) || (tokens[at] === "^" && !above) || tokens[at] === "'") {
      const mark = tokens[at++];
      if (mark === "_") below = group(); else if (mark === "^") above = group();
      else { let primes = "′"; while (tokens[at] === "'") { primes += "′"; at++; } above = above ? e("mrow", e("mo", primes), above) : e("mo", primes); }
      skip();
    }
    const limits = base.limits && wide;
    if (below && above) return e(limits ? "munderover" : "msubsup", base, below, above);
    if (below) return e(limits || base.limits === "name" ? "munder" : "msub", base, below);
    return above ? e(limits ? "mover" : "msup", base, above) : base;
  };
  const atom = () => {
    if (++depth > 200) { at = tokens.length; return e("mrow"); }
    try { return read(tokens[at++]); } finally { depth--; }
  };
  const fence = () => { skip(); const t = tokens[at++] || "."; return t === "." ? "" : SIGNS[t.slice(1)] || (t === "\\|" ? "‖" : t.replace("\\", "")); };
  const read = token => {
    if (token === "{") { at--; return group(); }
    if (/^\d/.test(token)) return e("mn", token);
    if (/^[a-zA-Z]$/.test(token) || /^[^\x00-\x7f]$/.test(token)) return e("mi", token);
    if (token[0] !== "\\") return e("mo", token === "-" ? "−" : token === "*" ? "∗" : token);
    const word = token.slice(1).replace("*", "");
    if (word in LARGE) return Object.assign(set(e("mo", LARGE[word]), { largeop: "true" }), { limits: word.includes("int") ? false : true });
    if (NAMES.has(word)) return Object.assign(e("mi", word), { limits: /^(lim|limsup|liminf|max|min|sup|inf|argmax|argmin)$/.test(word) ? "name" : false });
    if (word in SIGNS) return e(/^[\p{L}∞∅ℏ]$/u.test(SIGNS[word]) ? "mi" : "mo", SIGNS[word]);
    if (word in SPACES) return set(e("mspace"), { width: `${SPACES[word]}em` });
    if (/^[dt]?frac$/.test(word)) return e("mfrac", group(), group());
    if (/^[dt]?binom$/.test(word)) return e("mrow", e("mo", "("), set(e("mfrac", group(), group()), { linethickness: "0" }), e("mo", ")"));
    if (word === "sqrt") {
      skip(); if (tokens[at] !== "[") return e("msqrt", group());
      at++; const root = row(t => t === "]"); at++; return e("mroot", group(), root);
    }
    if (/^(text|textbf|textit|textrm|mbox)$/.test(word)) return e("mtext", raw());
    if (word in STYLES) {
      const kind = STYLES[word];
      if (kind === "double") return e("mi", [...raw()].map(c => DOUBLE[c] || c).join(""));
      if (kind === "normal") return set(e("mi", raw()), { mathvariant: "normal" });
      const inside = group(); if (kind === "bold") inside.classList.add("bold"); return inside;
    }
    if (word in ACCENTS) return set(e("mover", group(), set(e("mo", ACCENTS[word]), { stretchy: /over|wide/.test(word) })), { accent: "true" });
    if (word === "underline" || word === "underbrace") return e("munder", group(), e("mo", word === "underline" ? "_" : "⏟"));
    if (word === "left") {
      const open = fence(), inside = many(t => t === "\\right"); at++;
      return e("mrow", set(e("mo", open), { fence: "true", stretchy: "true" }), ...inside, set(e("mo", fence()), { fence: "true", stretchy: "true" }));
    }
    if (/^([bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|middle)$/.test(word)) return e("mrow");
    if (word === "begin") return table(raw());
    if (word === "\\") return set(e("mspace"), { linebreak: "newline" });
    if (word.length === 1) return e("mo", word === "|" ? "‖" : word);
    return e("mtext", token);
  };
  const table = name => {
    const rows = [[]], ends = t => t === "&" || t === "\\\\" || t === "\\end";
    if (name === "array") raw();
    for (;;) {
      rows[rows.length - 1].push(e("mtd", ...many(ends)));
      const token = tokens[at++];
      if (token === "\\\\") rows.push([]);
      else if (token !== "&") { raw(); break; }
    }
    if (rows[rows.length - 1].every(cell => !cell.childNodes.length)) rows.pop();
    const made = e("mtable", ...rows.map(cells_ => e("mtr", ...cells_)));
    if (/^(aligned|align|split|cases|gathered)/.test(name)) made.classList.add("lined");
    const [open, close] = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ " }[name] || "  ";
    return e("mrow", ...(open === " " ? [] : [set(e("mo", open), { fence: "true", stretchy: "true" })]), made, ...(close === " " ? [] : [set(e("mo", close), { fence: "true", stretchy: "true" })]));
  };
  const inside = [];
  while (at < tokens.length) { inside.push(...many(() => false)); }
  return set(e("math", e("mrow", ...inside)), { display: wide ? "block" : "inline", alttext: source.trim() });
}
