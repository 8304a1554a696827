/* The three curves, drawn by uPlot (vendor/uplot). `Charts.show(data)` may be called as often as there is news. */
"use strict";
const Charts = (() => {
  const UNITS = { loss: "", samples_per_second: "samples/s", volunteers: "here" };
  const FEW_DAYS = 2.5 * 86400;  // s; up to here hours are told
  const POINTS = 240;  // of a curve on the screen; more is noise
  const plots = {};  // by the name of the curve
  let data = null;
  let range = 0;  // s up to the newest point; 0: the whole run
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
  const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });
  const text = (format, time) => format.format(new Date(1000 * time));

  function value(key, number) {
    if (number == null) return "–";
    return key === "loss" ? number.toFixed(2) : key === "volunteers" ? whole.format(number) : (number >= 100 ? whole : exact).format(number);
  }

  /* One curve's times, values and steps as far as they are seen: as dense everywhere, unknown values left out, and a
     hole where nobody reported for a while. The newest point stays as it is. */
  function columns(key) {
    const [from, to] = span(), width = (to - from) / POINTS;
    const found = { times: [], values: [], steps: [] };
    let stretch = -Infinity, members = 0;
    data.time.forEach((time, i) => {
      const fresh = data[key][i], at = found.times.length - 1;
      if (fresh == null || time < from) return;
      const its = time === to ? Infinity : Math.floor((time - from) / width);
      members = its === stretch ? members + 1 : 1;
      if (its !== stretch) {
        found.times.push(time); found.values.push(fresh); found.steps.push(data.epoch[i]);
      } else {
        found.times[at] = time; found.steps[at] = data.epoch[i];
        found.values[at] += (fresh - found.values[at]) / members;
      }
      stretch = its;
    });
    return withHoles(found);
  }

  function withHoles({ times, values, steps }) {
    for (let i = times.length - 2; i > 0; i--) {
      const pause = times[i + 1] - times[i];
      const usual = Math.max(times[i] - times[i - 1], (times[i + 2] ?? times[i + 1] + pause) - times[i + 1]);
      if (pause > 300 && pause > 5 * usual) {
        times.splice(i + 1, 0, times[i] + pause / 2); values.splice(i + 1, 0, null); steps.splice(i + 1, 0, null);
      }
    }
    return { times, values, steps };
  }

  function span() {
    const first = data.time[0], last = data.time[data.time.length - 1];
    const from = range ? Math.max(first, last - range) : first;
    return last - from < 60 ? [last - 60, last] : [from, last];
  }

  /* Round numbers around what is seen. */
  function bounds(plot, low, high) {
    if (low == null) return [0, 1];
    if (plot.vkKey !== "loss") return [0, Math.max(high * 1.08, plot.vkKey === "volunteers" ? 2 : 0.1)];
    const room = Math.max((high - low) * 0.08, Math.abs(high) * 0.01, 0.01);
    return [low - room, high + room];
  }

  /* s between two labels: such that no two are the same. */
  function timeSteps() {
    const [from, to] = span();
    return to - from > FEW_DAYS ? [1, 2, 3, 7, 14, 28, 56, 112, 224].map((days) => 86400 * days) :
      [1, 2, 5, 10, 15, 30, 60, 120, 180, 240, 360, 720].map((minutes) => 60 * minutes);
  }

  /* Hours of one day, or days; the day is told with the first hour of it. */
  function timeLabels(plot, splits) {
    const [from, to] = span();
    if (to - from > FEW_DAYS) return splits.map((time) => text(day, time));
    let before = null;
    return splits.map((time) => {
      const date = text(day, time), isNew = before !== null && date !== before;
      before = date;
      return isNew ? date : text(clock, time);
    });
  }

  function paint(plot) {
    const { ctx, bbox } = plot, ratio = devicePixelRatio, { times, values } = plot.vkColumns;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 4 * ratio, bbox.width + 8 * ratio, bbox.height + 8 * ratio);
    ctx.clip();
    for (const [time] of data.marks) {
      const x = Math.round(plot.valToPos(time, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = ctx.fillStyle = colour("busy");
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 4 * ratio]);
      ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
      if (plot.vkKey === "loss") {
        const isLate = x > bbox.left + bbox.width - 70 * ratio;
        ctx.font = `${12 * ratio}px system-ui, sans-serif`;
        ctx.textAlign = isLate ? "right" : "left";
        ctx.textBaseline = "top";
        ctx.fillText("went back", x + (isLate ? -5 : 5) * ratio, bbox.top + 2 * ratio);
      }
    }
    const last = values.length - 1;
    if (last >= 0) {
      ctx.fillStyle = colour("accent");
      ctx.beginPath();
      ctx.arc(plot.valToPos(times[last], "x", true), plot.valToPos(values[last], "y", true), 4 * ratio, 0, 7);
      ctx.fill();
    }
    ctx.restore();
  }

  function tell(plot) {
    const { times, values, steps } = plot.vkColumns, at = plot.cursor.idx;
    const isPointed = at != null && values[at] != null;
    const i = isPointed ? at : values.length - 1;
    const when = isPointed ? `${text(day, times[i])} ${text(clock, times[i])}: ` : "";
    const step = steps[i] == null ? "" : ` at step ${whole.format(steps[i])}`;
    const told = plot.vkKey === "loss" ? value("loss", values[i]) : `${value(plot.vkKey, values[i])} ${UNITS[plot.vkKey]}`;
    plot.vkReadout.textContent = i < 0 ? "" : when + told + step;
  }

  function options(key, box) {
    const axis = { stroke: colour("soft"), font: "12px system-ui, sans-serif", ticks: { show: false } };
    const grid = { stroke: colour("line"), width: 1 };
    return {
      width: box.clientWidth, height: box.clientHeight, legend: { show: false }, padding: [8, 24, 0, 0],
      cursor: { y: false, drag: { setScale: false, x: false, y: false }, sync: { key: "vk", scales: ["x", null] },
        points: { size: 8, fill: colour("accent") } },
      scales: { x: { range: span }, y: { range: bounds } },
      axes: [
        { ...axis, grid: { show: false }, values: timeLabels, incrs: timeSteps, space: 64, size: 26 },
        { ...axis, grid, size: 48, gap: 6, space: 34, values: (_, marks) => marks.map((mark) => compact.format(mark)),
          ...(key === "volunteers" ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4] } : {}) },
      ],
      series: [{}, {
        stroke: colour("accent"), width: 2, fill: colour("fill"), points: { show: false },
        ...(key === "volunteers" ? { paths: uPlot.paths.stepped({ align: 1 }) } : {}),
      }],
      hooks: { draw: [paint], setCursor: [tell], setData: [tell] },
    };
  }

  function draw(key, box) {
    const found = columns(key), shown = [found.times, found.values];
    if (plots[key]) {
      plots[key].vkColumns = found;
      plots[key].setData(shown);
      return;
    }
    if (!found.values.length) return;
    const setUp = options(key, box);
    setUp.hooks.init = [(plot) => {  // before anything is drawn
      plot.vkKey = key; plot.vkColumns = found;
      plot.vkReadout = box.parentElement.querySelector(".readout");
    }];
    plots[key] = new uPlot(setUp, shown, box);
    tell(plots[key]);
  }

  function drawAll() {
    if (!data) return;
    for (const box of document.querySelectorAll("[data-chart]")) draw(box.dataset.chart, box);
    const length = data.time.length ? data.time[data.time.length - 1] - data.time[0] : 0;
    const ranges = document.querySelector(".ranges");
    ranges.hidden = length < 5400;
    ranges.querySelector('[data-range="86400"]').hidden = length < 1.2 * 86400;
  }

  function again() {
    for (const key of Object.keys(plots)) { plots[key].destroy(); delete plots[key]; }
    drawAll();
  }

  document.querySelector(".ranges").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    range = Number(button.dataset.range);
    for (const each of event.currentTarget.children) each.setAttribute("aria-pressed", String(each === button));
    drawAll();
  });
  dark.addEventListener("change", again);
  const sizes = new ResizeObserver((changed) => {
    for (const { target } of changed) {
      plots[target.dataset.chart]?.setSize({ width: target.clientWidth, height: target.clientHeight });
    }
  });
  document.querySelectorAll("[data-chart]").forEach((box) => sizes.observe(box));

  return { show(news) { data = news; drawAll(); }, plots };
})();
