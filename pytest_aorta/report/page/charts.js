// The plots of a test's launches, which are drawn when they come into view for the first time.
const aortaCharts = (data) => {
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const { color } = aortaTheme;
  const drawn = new Map();
  const kinds = { steps, loss: curves, grad_norm: curves, timeline: bars, schedule: bars, waits: bars };
  // Values whose largest is so many times the smallest are drawn on a logarithmic axis.
  const FAR_APART = 3;

  function redraw() {
    drawn.forEach((plot, figure) => { plot.destroy(); drawn.delete(figure); });
    drawVisible();
  }
  const watcher = new IntersectionObserver(
    (seen) => seen.forEach((one) => one.isIntersecting && draw(one.target)), { rootMargin: "300px" });
  function drawVisible() {
    all("details.test-entry[open] figure.plot").filter((figure) => !drawn.has(figure)).forEach((figure) => {
      watcher.unobserve(figure);
      watcher.observe(figure);
    });
  }
  function draw(figure) {
    if (drawn.has(figure)) return;
    const plots = data.plots[figure.dataset.case];
    const canvas = figure.querySelector(".canvas");
    const tools = figure.querySelector(".tools");
    canvas.replaceChildren();
    tools.replaceChildren();
    const plot = kinds[figure.dataset.kind](plots, canvas, figure);
    drawn.set(figure, plot);
    addTools(plot, tools, canvas, figure, plots);
  }
  aortaFitToWindow(drawn);

  // Zoom: by dragging over the plot, by buttons and by keys.
  function zoom(plot, factor, shift = 0) {
    const { min, max } = plot.scales.x;
    const [first, last] = plot.whole;
    const width = Math.min(last - first, (max - min) * factor);
    const middle = (min + max) / 2 + shift * (max - min);
    const low = Math.max(first, Math.min(last - width, middle - width / 2));
    plot.setScale("x", { min: low, max: low + width });
  }
  function addTools(plot, tools, canvas, figure, plots) {
    const sides = { candidate: "candidate", reference: plots.reference };
    if (figure.dataset.kind === "steps" && plots.launches.length > 1) {
      const choice = document.createElement("select");
      choice.setAttribute("aria-label", "Launch");
      plots.launches.forEach((launch, number) => choice.add(new Option(`${sides[launch.side]} ${launch.number}`, number)));
      choice.value = figure.dataset.launch ?? 0;
      choice.addEventListener("change", () => {
        figure.dataset.launch = choice.value;
        drawn.get(figure).destroy();
        drawn.delete(figure);
        draw(figure);
        figure.querySelector("select").focus();
      });
      tools.append(choice);
    }
    const zooms = [["+", "Zoom in", () => zoom(plot, 0.5)], ["\u2212", "Zoom out", () => zoom(plot, 2)],
      ["All", "Show all", () => zoom(plot, Infinity)]];
    for (const [label, title, act] of zooms) {
      const tool = document.createElement("button");
      Object.assign(tool, { type: "button", textContent: label, title });
      tool.setAttribute("aria-label", title);
      tool.addEventListener("click", act);
      tools.append(tool);
    }
    const keys = { "+": () => zoom(plot, 0.5), "=": () => zoom(plot, 0.5), "-": () => zoom(plot, 2),
      0: () => zoom(plot, Infinity), ArrowLeft: () => zoom(plot, 1, -0.25), ArrowRight: () => zoom(plot, 1, 0.25) };
    canvas.onkeydown = (event) => {
      const act = !event.ctrlKey && !event.metaKey && !event.altKey && keys[event.key];
      if (act) { event.preventDefault(); act(); }
    };
    all(".u-legend .u-series", canvas).slice(1).forEach((row) => {
      row.tabIndex = 0;
      row.addEventListener("keydown", (event) => {
        if (event.key === "Enter" || event.key === " ") { event.preventDefault(); row.querySelector("th").click(); }
      });
    });
  }

  const brief = (value) => value == null ? "-" : `${Number(value.toPrecision(4))}`;
  // As many digits as tell the ticks of an axis apart, and room for the longest of them.
  function labels(plot, places) {
    for (let digits = 4; ; digits++) {
      const shown = places.map((at) => at == null ? "" : `${Number(at.toPrecision(digits))}`);
      if (digits === 12 || new Set(shown.filter(Boolean)).size === shown.filter(Boolean).length) return shown;
    }
  }
  const room = (plot, shown) => Math.max(60, 22 + 7 * Math.max(0, ...(shown ?? []).map((text) => text.length)));
  const wholeSteps = [1, 2, 5].flatMap((first) => [1, 10, 100, 1000, 1e4, 1e5].map((power) => first * power)).sort((one, two) => one - two);
  const axis = (more) => ({
    stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 },
    font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 20, ...(more.label === "step" ? { incrs: wholeSteps } : {}), ...more,
  });
  const hueOf = (number, count) => `hsl(${Math.round(205 + 330 * number / count) % 360} 65% ${aortaTheme.isDark() ? 66 : 40}%)`;
  const DASHES = { baseline: [5, 4], reference: [2, 3] };
  const MARKERS = { [DASHES.baseline]: "dashed", [DASHES.reference]: "dotted" };
  function make(canvas, height, options, values, whole) {
    const figure = canvas.parentElement;
    // The visible range is an attribute of the figure, for scripts and for readers who use the inspector.
    const storeRange = (plot, scale) => {
      if (scale === "x") figure.dataset.range = `${plot.scales.x.min} ${plot.scales.x.max}`;
    };
    const lines = { fill: (plot, at) => plot.series[at].stroke?.() ?? null, dash: (plot, at) => MARKERS[plot.series[at].dash] ?? "solid" };
    const plot = new uPlot({
      width: canvas.clientWidth, height, cursor: { drag: { x: true, y: false, uni: 10 }, points: { size: 5 } },
      legend: { live: true, markers: { width: 3, ...lines } }, ...options, hooks: { ...options.hooks, setScale: [storeRange] },
    }, values, canvas);
    plot.whole = whole;
    plot.root.querySelector("canvas").setAttribute("role", "img");
    plot.root.querySelector("canvas").setAttribute("aria-label", canvas.getAttribute("aria-label"));
    return plot;
  }

  // Times in milliseconds: on a logarithmic axis where they are far apart, as after a step that took ten times as long.
  function timeAxis(figure, columns) {
    let low = Infinity, high = -Infinity;
    for (const column of columns) {
      for (const value of column) { if (value < low) low = value; if (value > high) high = value; }
    }
    const isLog = low > 0 && high / low > FAR_APART;
    figure.dataset.scale = isLog ? "logarithmic" : "linear";
    const range = (_, least, most) => isLog ? [least / 1.1, most * 1.1] : uPlot.rangeNum(least, most, 0.1, false);
    const splits = isLog ? { splits: (plot, at, least, most) => logSplits(least, most), filter: (plot, places) => places } : {};
    return {
      scale: { distr: isLog ? 3 : 1, range },
      axis: axis({ label: isLog ? "ms, logarithmic" : "ms", size: room, values: labels, ...splits }),
    };
  }
  function logSplits(least, most) {
    const decades = Math.log10(most / least);
    const factors = decades > 3 ? [1] : decades > 1.2 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 8];
    const found = [];
    for (let power = 10 ** Math.floor(Math.log10(least)); power <= most; power *= 10) {
      found.push(...factors.map((factor) => factor * power).filter((value) => value >= least && value <= most));
    }
    return found;
  }
  function median(values) {
    const sorted = Float64Array.from(values).sort();
    const middle = sorted.length >> 1;
    return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
  }
  // A legend shows the values under the pointer, and otherwise one value that stands for the whole line.
  const orElse = (whole) => (plot, value) => brief(value ?? whole);
  function addBand(band, parts, series, values, bands, whole) {
    const look = { stroke: color(`${band.side}-line`), dash: DASHES[band.side], points: { show: false } };
    parts.forEach(([column, of], place) => {
      values.push(column);
      series.push({ ...look, label: place === 1 ? whole.label : "", class: place === 1 ? null : "edge", width: place === 1 ? 1.6 : 0, value: orElse(of) });
    });
    bands.push({ series: [series.length - 1, series.length - 3], fill: color(band.side) });
  }

  function steps(plots, canvas, figure) {
    const launch = plots.launches[figure.dataset.launch ?? 0];
    const ranks = launch.ranks.map((rank) => Float32Array.from(rank));
    const count = ranks[0].length;
    const xs = Float64Array.from({ length: count }, (_, place) => place * launch.block + 1);
    const slowest = Float32Array.from(xs, (_, place) => Math.max(...ranks.map((rank) => rank[place])));
    const values = [xs, slowest, ...ranks];
    const series = [
      { label: launch.block > 1 ? `slowest of ${launch.block} steps from` : "step", value: (plot, value) => value == null ? "median of all" : brief(value) },
      { label: "slowest rank", stroke: color("muted"), width: 4, alpha: 0.45, value: orElse(median(slowest)), points: { show: false } },
      ...ranks.map((rank, number) => ({ label: `rank ${number}`, stroke: hueOf(number, ranks.length), width: 1, value: orElse(median(rank)), points: { show: false } }))];
    const bands = [];
    for (const band of plots.bands) {
      const columns = band.p50.map((value) => [new Float32Array(count).fill(value), value]);
      addBand(band, columns, series, values, bands, { label: `${band.name} p50` });
    }
    const times = timeAxis(figure, values.slice(1));
    return make(canvas, 280, { series, bands, scales: { x: { time: false }, y: times.scale },
      axes: [axis({ label: "step", size: 34 }), times.axis] }, values, [1, Number(xs[count - 1])]);
  }

  // Lines of both sides over steps, of which a side may lack some.
  function curves(plots, canvas, figure) {
    const { steps: xs, lines } = plots[figure.dataset.kind];
    const last = (column) => column.findLast((value) => value != null);
    const series = [{ label: "step", value: (plot, value) => value ?? "last" }, ...lines.map(({ side, values }) => ({
      label: side, stroke: color(side === "candidate" ? "compute" : "reference-line"), width: 1.6, spanGaps: true,
      dash: side === "candidate" ? undefined : DASHES.baseline, points: { show: xs.length < 40, size: 5 }, value: orElse(last(values)),
    }))];
    const values = [xs, ...lines.map((line) => line.values)];
    return make(canvas, 220, { series, scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] } },
      axes: [axis({ label: "step", size: 34 }), axis({ size: room, values: labels })] },
      values, [xs[0], xs[xs.length - 1]]);
  }

  // Rows of bars over milliseconds or steps. The strength of a bar's color is its value, where bars have values.
  function bars(plots, canvas, figure) {
    const { rows, begin, end, unit, arrows } = plots[figure.dataset.kind];
    const middles = [];
    const most = rows.reduce((found, row) => row.bars.reduce((high, { values }) => values.reduce((a, b) => Math.max(a, b), high), found), 0);
    const blocks = [];
    const marks = [];
    let height = 0;
    for (const row of rows) {
      if (marks.at(-1)?.name !== row.name) {
        height += marks.length && row.height < rows.length ? 0.3 : 0;
        marks.push({ name: row.name, top: height });
      }
      row.bars.forEach((bar) => blocks.push({ ...bar, name: row.name, y: height, tall: row.height }));
      middles.push(height + row.height * 0.44);
      height += row.height;
      marks.at(-1).at = (marks.at(-1).top + height) / 2;
    }
    const hint = document.createElement("div");
    hint.className = "hint";
    hint.hidden = true;
    // Rows of many ranks become thin, and the drawing tall up to a limit; names are left out where they would overlap.
    const tall = Math.min(24 * height, Math.max(460, Math.min(1600, 3.5 * height)));
    const every = Math.ceil(14 / (tall / marks.length));
    const shown = marks.filter((mark, place) => place % every === 0);
    // As the range, the names are an attribute of the figure.
    figure.dataset.named = shown.map(({ name }) => name).join(", ");
    const room = Math.min(canvas.clientWidth * 0.46, 24 + 6.6 * Math.max(...shown.map(({ name }) => name.length)));
    // Names of parameters differ at their begin, and end alike.
    const letters = Math.floor((room - 24) / 6.4), head = Math.floor(letters / 2);
    const fitting = (name) => name.length > letters ? `${name.slice(0, head)}\u2026${name.slice(head + 1 - letters)}` : name;
    const paint = (plot) => {
      const { ctx } = plot;
      const { left, top, width, height: down } = plot.bbox;
      ctx.save();
      ctx.beginPath();
      ctx.rect(left, top, width, down);
      ctx.clip();
      for (const { kind, y, tall: part, spans, values } of blocks) {
        ctx.fillStyle = fill(kind);
        const from = plot.valToPos(height - y, "y", true);
        const to = plot.valToPos(height - y - part * 0.88, "y", true);
        spans.forEach(([first, last], place) => {
          const x = plot.valToPos(first, "x", true);
          ctx.globalAlpha = values.length ? 0.06 + 0.94 * values[place] / (most || 1) : 1;
          ctx.fillRect(x, from, Math.max(0.5 * devicePixelRatio, plot.valToPos(last, "x", true) - x), to - from);
        });
        ctx.globalAlpha = 1;
      }
      ctx.fillStyle = color("text");
      const size = 3 * devicePixelRatio;
      for (const [at, start, stop] of arrows) {
        const x = plot.valToPos(at, "x", true);
        const up = Math.sign(middles[start] - middles[stop]);
        const from = plot.valToPos(height - middles[start], "y", true);
        const tip = plot.valToPos(height - middles[stop] - up * 0.44, "y", true);
        ctx.fillRect(x - size / 6, Math.min(from, tip), size / 3, Math.abs(tip - from));
        ctx.beginPath();
        ctx.moveTo(x, tip);
        ctx.lineTo(x - size, tip + up * 2 * size);
        ctx.lineTo(x + size, tip + up * 2 * size);
        ctx.fill();
      }
      ctx.restore();
    };
    const place = (at) => `${unit} ${brief(at)}`;
    const range = ([first, last]) => unit === "ms" ? `${brief(first)} to ${brief(last)} ms (${brief(last - first)} ms)`
      : last - first > 1 ? `${unit}s ${first} to ${last - 1}` : place(first);
    const point = (plot) => {
      const { left, top } = plot.cursor;
      hint.hidden = true;
      if (left == null || left < 0) return;
      const at = plot.posToVal(left, "x");
      const down = height - plot.posToVal(top, "y");
      for (const { kind, name, spans, values, texts, y, tall: part } of blocks) {
        if (down < y || down >= y + part) continue;
        const number = spans.findIndex(([first, last]) => at >= first && at <= last);
        if (number < 0) continue;
        const value = values.length ? ` ${brief(values[number])} ms` : "";
        const text = texts[number] ? `: ${texts[number]}` : "";
        hint.textContent = `${name} ${words(kind)}${text}${value}: ${range(spans[number])}`;
        hint.hidden = false;
        const { over } = plot;
        hint.style.left = `${Math.max(0, Math.min(over.offsetLeft + left + 12, canvas.clientWidth - hint.offsetWidth))}px`;
        hint.style.top = `${over.offsetTop + top + 14}px`;
        return;
      }
    };
    const names = { splits: () => shown.map(({ at }) => height - at), values: () => shown.map(({ name }) => fitting(name)) };
    const plot = make(canvas, Math.max(90, tall + 50), {
      legend: { show: false }, cursor: { drag: { x: true, y: false }, y: false, points: { show: false } },
      series: [{}, { paths: () => null, points: { show: false } }], scales: { x: { time: false, range: (_, low, high) => [low, high] }, y: { range: [0, height] } },
      axes: [axis({ label: unit, size: 34 }), axis({ size: room, grid: { show: false }, ...names })],
      hooks: { draw: [paint], setCursor: [point] },
    }, [[begin, end], [null, null]], [begin, end]);
    const keys = document.createElement("ul");
    keys.className = "keys";
    for (const kind of new Set(blocks.map((block) => block.kind))) {
      const row = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = fill(kind);
      row.append(swatch, words(kind), most ? ` (darkest: ${brief(most)} ms)` : "");
      keys.append(row);
    }
    canvas.append(hint, keys);
    return plot;
  }
  const words = (kind) => kind.replaceAll("_", " ");
  const fill = (kind) => color(kind) || color("other");
  return { drawVisible, redraw };
};
