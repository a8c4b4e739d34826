"use strict";
(() => {
  const { color } = aortaTheme;
  const drawn = new Map();

  function redraw() {
    drawn.forEach((plot, figure) => { plot.destroy(); drawn.delete(figure); });
    document.querySelectorAll("figure.plot").forEach((figure) => { watcher.unobserve(figure); watcher.observe(figure); });
  }

  // A chart is drawn when it comes into view.
  const watcher = new IntersectionObserver(
    (seen) => seen.forEach((one) => one.isIntersecting && draw(one.target)), { rootMargin: "300px" });
  const decoded = (text, kind) => new kind(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer);
  const brief = (value) => value == null ? "-" : `${Number(value.toPrecision(5))}`;
  const known = (values) => Array.from(values, (value) => Number.isNaN(value) ? null : value);
  // The script's values of each case, with the version of each launch decoded.
  const cases = JSON.parse(document.getElementById("data").textContent)
    .map((data) => ({ ...data, at: decoded(data.at, Uint32Array), dirty: new Set(data.dirty) }));

  function draw(figure) {
    if (drawn.has(figure)) return;
    const canvas = figure.querySelector(".canvas");
    canvas.replaceChildren();
    const data = cases[figure.dataset.case];
    drawn.set(figure, chart(canvas, figure, data, data.charts[figure.dataset.metric]));
  }

  // The range of y covers the launches, the medians and the baseline of the versions that are shown.
  function extent(at, values, first, last) {
    let low = Infinity, high = -Infinity;
    const add = (index, value) => {
      if (index >= first && index <= last && value != null && !Number.isNaN(value)) {
        if (value < low) low = value;
        if (value > high) high = value;
      }
    };
    values.launches.forEach((value, place) => add(at[place], value));
    values.baseline.forEach((value, index) => add(index, value));
    if (low > high) return [0, 1];
    const margin = 0.06 * (high - low) || 0.02 * Math.abs(high) || 1;
    return [low - margin, high + margin];
  }

  function chart(canvas, figure, data, given) {
    const values = {
      launches: decoded(given.launches, Float64Array), medians: known(decoded(given.medians, Float64Array)),
      baseline: known(decoded(given.baseline, Float64Array)),
    };
    const count = data.names.length;
    const label = (index) => data.names[index] === undefined ? "" : `${data.names[index]}${data.dirty.has(index) ? "+" : ""}`;
    const axis = (more) => ({
      stroke: color("muted"), grid: { stroke: color("grid"), width: 1 }, ticks: { stroke: color("grid"), width: 1 },
      font: "12px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif", labelSize: 18, ...more,
    });
    // Without a pointer the legend shows the newest version.
    const newest = (column) => column[column.findLastIndex((number) => number !== null)];
    const value = (column) => (plot, number) => brief(number ?? newest(column));
    const series = [
      { label: "version", value: (plot, index) => `${label(index ?? count - 1)} ${data.times[index ?? count - 1]}` },
      { label: "median", stroke: color("compute"), width: 1.5, value: value(values.medians), points: { show: count <= 120, size: 5 }, spanGaps: true },
    ];
    const columns = [Float64Array.from({ length: count }, (_, index) => index), values.medians];
    if (values.baseline.some((center) => center !== null)) {
      series.push({ label: "baseline", stroke: color("band-line"), width: 1.2, dash: [5, 4], value: value(values.baseline), points: { show: false } });
      columns.push(values.baseline);
    }
    const plot = new uPlot({
      width: canvas.clientWidth, height: 260, series,
      legend: { live: true, markers: { dash: (plot, at) => plot.series[at].dash ? "dashed" : "solid" } },
      cursor: { drag: { x: true, y: false, uni: 10 }, points: { size: 5 } },
      scales: { x: { time: false, range: (_, low, high) => low === high ? [low - 1, high + 1] : [low, high] },
        y: { range: (plot) => extent(data.at, values, plot.scales.x.min ?? 0, plot.scales.x.max ?? count - 1) } },
      axes: [axis({ size: 34, space: 70, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 50000],
        values: (_, splits) => splits.map(label) }), axis({ label: given.unit || undefined, size: 62 })],
      hooks: { drawClear: [(plot) => paint(plot, data, values, given)], ready: [() => { figure.dataset.drawn = performance.now(); }] },
    }, columns, canvas);
    const surface = plot.root.querySelector("canvas");
    surface.setAttribute("role", "img");
    surface.setAttribute("aria-label", canvas.getAttribute("aria-label"));
    return plot;
  }

  // Under the lines: the launches, change points and revisions of the baseline.
  function paint(plot, { at, revisions }, values, given) {
    const { ctx } = plot;
    const { left, top, width, height } = plot.bbox;
    const size = 2 * devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, width, height);
    ctx.clip();
    ctx.globalAlpha = 0.4;
    ctx.fillStyle = color("compute");
    // Both scales are linear; two calls per scale take a hundredth of the time of two calls per launch.
    const linear = (scale, [low, high]) => {
      const zero = plot.valToPos(low, scale, true);
      const slope = (plot.valToPos(high, scale, true) - zero) / (high - low);
      return (value) => zero + slope * (value - low) - size / 2;
    };
    const { x, y } = plot.scales;
    const toX = linear("x", [x.min, x.max]), toY = linear("y", [y.min, y.max]);
    values.launches.forEach((value, place) => {
      if (!Number.isNaN(value) && at[place] >= x.min && at[place] <= x.max) ctx.fillRect(toX(at[place]), toY(value), size, size);
    });
    ctx.globalAlpha = 1;
    const line = (index, stroke, dash) => {
      const x = plot.valToPos(index - 0.5, "x", true);
      ctx.strokeStyle = stroke;
      ctx.lineWidth = 1.5 * devicePixelRatio;
      ctx.setLineDash(dash.map((part) => part * devicePixelRatio));
      ctx.beginPath();
      ctx.moveTo(x, top);
      ctx.lineTo(x, top + height);
      ctx.stroke();
      return x;
    };
    given.changes.forEach(([index, verdict]) => line(index, color({ worse: "bad", better: "good" }[verdict] || "warn"), []));
    ctx.fillStyle = color("muted");
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    revisions.forEach(([index, revision]) => {
      const x = line(index, color("muted"), [2, 3]);
      ctx.fillText(`baseline ${revision}`, x + 3 * devicePixelRatio, top + 11 * devicePixelRatio);
    });
    ctx.restore();
  }

  aortaFitToWindow(drawn);

  aortaTheme.follow(redraw);
})();
