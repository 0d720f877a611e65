// Draw the charts of a report with uPlot: values at the pointer, zoom, smoothing, and downloads. The data stand in the
// element "data"; see `series.py`. Texts of runs are set as text only, never as HTML.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement, charts = [];
  const state = { axis: Object.keys(data.axes)[0], smoothing: 0, singles: false, off: new Set(), zoom: null };
  const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
  const MOST_ROWS = 12;

  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const color = (line) => css(`--c${data.groups[line.group].color}`);

  function compact(value) {
    const size = Math.abs(value);
    for (const [scale, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
      if (size >= scale) return +(value / scale).toPrecision(4) + unit;
    }
    return String(+value.toPrecision(4));
  }

  // A centred moving mean, as in `pytorchrl.analysis.smooth`: near both ends, the window is narrower.
  function smooth(values) {
    const reach = Math.floor(state.smoothing * values.length / 2);
    if (!reach) return values;
    const sums = [0];
    for (const value of values) sums.push(sums[sums.length - 1] + value);
    return values.map((_, at) => {
      const half = Math.min(reach, at, values.length - 1 - at);
      return (sums[at + half + 1] - sums[at - half]) / (2 * half + 1);
    });
  }

  function isShown(line) {
    return !state.off.has(line.group) && !(line.hidden && !state.singles) && line[state.axis] !== undefined;
  }

  // The points of a line that are drawn: x, y, and for a band its lower and upper end.
  function pointsOf(line) {
    const points = line[state.axis];
    return points ? [points[0], ...points.slice(1).map(smooth)] : [[], []];
  }

  // The value of a line at x by linear interpolation; null outside of the line.
  function valueAt(xs, ys, x) {
    if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle; else high = middle;
    }
    const width = xs[high] - xs[low];
    return width ? ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / width : ys[low];
  }

  function rangeOfX(chart) {
    let low = Infinity, high = -Infinity;
    for (const line of chart.lines) {
      const xs = line[state.axis] ? line[state.axis][0] : [];
      if (xs.length) { low = Math.min(low, xs[0]); high = Math.max(high, xs[xs.length - 1]); }
    }
    if (!(low <= high)) return [0, 1];
    if (low > 0 && low < 0.5 * high) low = 0;
    return low < high ? [low, high] : [low - 0.5, high + 0.5];
  }

  function rangeOfY(chart, points, left, right) {
    let low = Infinity, high = -Infinity, bandLow = Infinity, bandHigh = -Infinity;
    chart.lines.forEach((line, place) => {
      if (!isShown(line)) return;
      const [xs, ys, lows, highs] = points[place];
      xs.forEach((x, at) => {
        if (x < left || x > right) return;
        low = Math.min(low, ys[at]); high = Math.max(high, ys[at]);
        if (lows) { bandLow = Math.min(bandLow, lows[at]); bandHigh = Math.max(bandHigh, highs[at]); }
      });
    });
    if (!(low <= high)) return [0, 1];
    // A band that reaches far beyond the lines is cut off, as in `pytorchrl plot`.
    const reach = 0.25 * (high - low);
    const ends = [Math.min(low, Math.max(bandLow, low - reach)), Math.max(high, Math.min(bandHigh, high + reach))];
    const pad = 0.05 * (ends[1] - ends[0]) || 0.5 * Math.abs(low) || 1;
    return [low >= 0 && ends[0] - pad < 0 ? 0 : ends[0] - pad, ends[1] + pad];
  }

  // The options of uPlot; all lengths are multiplied by `k`, which is 1 on the page and 2 in a picture.
  function optionsOf(chart, points, width, height, k, hooks) {
    const axis = (label, size) => ({
      label, size: size * k, labelSize: 18 * k, gap: 4 * k, font: `${11 * k}px system-ui,sans-serif`,
      labelFont: `${12 * k}px system-ui,sans-serif`, labelGap: 2 * k, stroke: () => css("--dim"), space: 56 * k,
      grid: { stroke: () => css("--line"), width: k }, ticks: { stroke: () => css("--line"), width: k, size: 4 * k },
      values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : compact(tick))),
    });
    const [left, right] = state.zoom || rangeOfX(chart);
    return {
      width: width * k, height: height * k, legend: { show: false }, padding: [8 * k, 14 * k, 0, 0],
      scales: {
        x: { time: false, min: left, max: right, range: (u, low, high) => (low === null ? rangeOfX(chart) : [low, high]) },
        y: { range: (u) => rangeOfY(chart, points(), u.scales.x.min ?? left, u.scales.x.max ?? right) },
      },
      axes: [axis(data.axes[state.axis], 32), { ...axis(chart.y, 46), space: 34 * k }],
      cursor: {
        y: false, points: { show: false }, drag: { x: true, y: false, dist: 4 },
        sync: { key: "report", scales: ["x", null] }, bind: { dblclick: () => null },
      },
      series: [{}, ...chart.lines.map((line) => ({
        label: line.label, show: isShown(line), spanGaps: true, stroke: () => color(line),
        width: (line.single ? 0.9 : 1.8) * k, dash: DASHES[data.groups[line.group].dash].map((part) => part * k),
        alpha: line.single ? 0.6 : 1,
        points: { show: line[state.axis] !== undefined && line[state.axis][0].length === 1, size: 6 * k },
      }))],
      hooks: { drawAxes: [(u) => drawBands(u, chart, points())], ...hooks },
    };
  }

  function drawBands(u, chart, points) {
    const { ctx } = u;
    const place = (x, y) => [u.valToPos(x, "x", true), u.valToPos(y, "y", true)];
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    chart.lines.forEach((line, number) => {
      if (!isShown(line)) return;
      const [xs, , lows, highs] = points[number];
      ctx.beginPath();
      if (lows) {
        xs.forEach((x, at) => ctx.lineTo(...place(x, highs[at])));
        for (let at = xs.length - 1; at >= 0; at -= 1) ctx.lineTo(...place(xs[at], lows[at]));
        ctx.globalAlpha = chart.lines.length > 10 ? 0.08 : 0.16;
        ctx.fillStyle = color(line);
        ctx.fill();
      } else if (state.smoothing && !line.single) {  // the values without smoothing, faintly
        line[state.axis][0].forEach((x, at) => ctx.lineTo(...place(x, line[state.axis][1][at])));
        ctx.globalAlpha = 0.25;
        ctx.strokeStyle = color(line);
        ctx.stroke();
      }
    });
    ctx.restore();
  }

  const joined = (points) => uPlot.join(points.map(([xs, ys]) => [xs, ys]));

  function Chart(element) {
    const chart = data.charts[Number(element.dataset.chart)], tip = document.createElement("div");
    let points = chart.lines.map(pointsOf), plot = null;
    tip.className = "tip";
    tip.hidden = true;
    const height = () => (element.classList.contains("large") ? 360 : 230) * (element.clientWidth < 480 ? 0.8 : 1);

    function build() {
      if (plot) plot.destroy();
      points = chart.lines.map(pointsOf);
      const hooks = { setCursor: [showTip], setSelect: [(u) => {
        if (u.select.width < 1) return;
        zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
      }] };
      plot = new uPlot(optionsOf(chart, () => points, Math.max(200, element.clientWidth), height(), 1, hooks),
                       joined(points), element);
      plot.over.append(tip);
      plot.over.addEventListener("dblclick", () => zoom(null));
      plot.over.addEventListener("mouseleave", () => { tip.hidden = true; });
    }

    function showTip(u) {
      const { left, top } = u.cursor;
      if (!u.over.matches(":hover") || left < 0) { tip.hidden = true; return; }
      const x = u.posToVal(left, "x"), rows = [];
      chart.lines.forEach((line, number) => {
        if (!isShown(line)) return;
        const [xs, ys, lows, highs] = points[number], y = valueAt(xs, ys, x);
        if (y === null) return;
        rows.push({ line, y, away: Math.abs(u.valToPos(y, "y") - top),
                    ends: lows ? [valueAt(xs, lows, x), valueAt(xs, highs, x)] : null });
      });
      if (!rows.length) { tip.hidden = true; return; }
      const nearest = rows.reduce((one, other) => (other.away < one.away ? other : one));
      const shown = rows.sort((one, other) => one.away - other.away).slice(0, MOST_ROWS).sort((one, other) => other.y - one.y);
      tip.replaceChildren();
      const add = (parent, tag, text, name) => {
        const node = document.createElement(tag);
        node.textContent = text;
        if (name) node.className = name;
        parent.append(node);
        return node;
      };
      add(tip, "div", `${compact(x)} ${data.axes[state.axis]}`, "dim");
      for (const row of shown) {
        const entry = add(tip, "div", "", row === nearest && rows.length > 1 ? "near" : "");
        add(entry, "i", "").style.background = color(row.line);
        add(entry, "b", compact(row.y));
        if (row.ends) add(entry, "span", ` [${row.ends.map(compact).join(", ")}]`, "dim");
        if (chart.lines.length > 1) add(entry, "span", ` ${row.line.label}`);
      }
      if (rows.length > shown.length) add(tip, "div", `and ${rows.length - shown.length} more`, "dim");
      tip.hidden = false;
      const wide = u.over.clientWidth, room = left + 16 + tip.offsetWidth <= wide;
      tip.style.left = `${room ? left + 16 : Math.max(0, left - 16 - tip.offsetWidth)}px`;
      tip.style.top = `${Math.max(0, Math.min(top - tip.offsetHeight / 2, u.over.clientHeight - tip.offsetHeight))}px`;
    }

    build();
    let width = element.clientWidth;
    new ResizeObserver(() => {
      if (element.clientWidth && element.clientWidth !== width) {
        width = element.clientWidth;
        plot.setSize({ width, height: height() });
      }
    }).observe(element);

    return {
      build,
      redraw: () => plot.redraw(false),
      zoom(range) {
        const [left, right] = range || rangeOfX(chart);
        plot.setScale("x", { min: left, max: right });
      },
      csv() {
        const quoted = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? "'" : "") + text.replaceAll('"', '""')}"`;
        const lines = [["line", data.axes[state.axis], chart.y, "low", "high"].map(quoted).join(",")];
        for (const line of chart.lines.filter(isShown)) {
          const [xs, ys, lows, highs] = line[state.axis];
          xs.forEach((x, at) => lines.push([quoted(line.label), x, ys[at], lows ? lows[at] : "", highs ? highs[at] : ""].join(",")));
        }
        save(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }), `${chart.file}.csv`);
      },
      png() {
        const w = Math.max(640, element.clientWidth), k = 2;
        new uPlot(optionsOf(chart, () => points, w, height() * 1.2, k, { draw: [(u) => {
          // uPlot multiplies all lengths by the screen's ratio of pixels, so that the canvas may be larger still.
          const real = u.ctx.canvas.width / (w * k);
          savePicture(u.ctx.canvas, k * real, chart, () => u.destroy());
        }] }), joined(points), document.createElement("div"));
      },
    };
  }

  // Add title and key of the groups to the drawn chart, and save the picture.
  function savePicture(drawn, k, chart, after) {
    if (drawn.dataset.saved) return;
    drawn.dataset.saved = "yes";
    const shown = [...new Set(chart.lines.filter(isShown).map((line) => line.group))];
    const keys = data.groups.length > 1 ? shown : [];
    const canvas = document.createElement("canvas"), ctx = canvas.getContext("2d");
    const font = `${12 * k}px system-ui,sans-serif`, pad = 12 * k, row = 18 * k;
    ctx.font = font;
    const places = [];
    let x = pad, y = 0;
    for (const group of keys) {
      const width = 22 * k + ctx.measureText(data.groups[group].label).width + 16 * k;
      if (x > pad && x + width > drawn.width - pad) { x = pad; y += row; }
      places.push([group, x, y]);
      x += width;
    }
    const top = 30 * k;
    canvas.width = drawn.width;
    canvas.height = top + drawn.height + (keys.length ? y + row + pad : pad);
    ctx.fillStyle = css("--bg");
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    ctx.drawImage(drawn, 0, top);
    ctx.fillStyle = css("--fg");
    ctx.font = `600 ${14 * k}px system-ui,sans-serif`;
    ctx.fillText(chart.title, pad, 20 * k);
    ctx.font = font;
    for (const [group, left, down] of places) {
      const base = top + drawn.height + down + 12 * k;
      ctx.strokeStyle = css(`--c${data.groups[group].color}`);
      ctx.lineWidth = 2 * k;
      ctx.setLineDash(DASHES[data.groups[group].dash].map((part) => part * k / 2));
      ctx.beginPath();
      ctx.moveTo(left, base - 4 * k);
      ctx.lineTo(left + 16 * k, base - 4 * k);
      ctx.stroke();
      ctx.fillText(data.groups[group].label, left + 22 * k, base);
    }
    canvas.toBlob((blob) => { save(blob, `${chart.file}.png`); after(); }, "image/png");
  }

  function save(blob, name) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  }

  function zoom(range) {
    state.zoom = range;
    for (const button of document.querySelectorAll("button[data-reset]")) button.hidden = range === null;
    for (const chart of charts) chart.zoom(range);
  }

  const rebuild = () => charts.forEach((chart) => chart.build());
  // Elements in a part that is folded have a width, but are not visible.
  const visible = (element) => element.clientWidth > 0 && (!element.checkVisibility || element.checkVisibility());
  const made = new Map();
  function makeVisible() {
    for (const element of document.querySelectorAll("[data-chart]")) {
      if (visible(element) && !made.has(element)) {
        made.set(element, Chart(element));
        charts.push(made.get(element));
      }
    }
  }

  document.addEventListener("click", function (event) {
    const button = event.target.closest("button");
    if (!button) return;
    const plot = button.closest(".card")?.querySelector("[data-chart]");
    if (button.dataset.save && plot) made.get(plot)[button.dataset.save]();
    else if (button.dataset.reset !== undefined) zoom(null);
    else if (button.dataset.group) {
      const group = Number(button.dataset.group);
      if (!state.off.delete(group)) state.off.add(group);
      button.setAttribute("aria-pressed", String(!state.off.has(group)));
      rebuild();
    }
  });
  document.addEventListener("input", function (event) {
    const { target } = event;
    if (target.id === "smoothing") state.smoothing = Number(target.value);
    else if (target.id === "axis") { state.axis = target.value; zoom(null); }
    else if (target.id === "singles") state.singles = target.checked;
    else return;
    rebuild();
  });
  document.addEventListener("toggle", makeVisible, true);
  document.addEventListener("theme", () => charts.forEach((chart) => chart.redraw()));
  matchMedia("(prefers-color-scheme:dark)").addEventListener("change", () => charts.forEach((chart) => chart.redraw()));
  function open() {
    const target = location.hash.length > 1 ? document.getElementById(location.hash.slice(1)) : null;
    if (target && target.tagName === "DETAILS") { target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", open);
  makeVisible();
  open();
})();
