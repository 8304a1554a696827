/* Keeps an open page up to date: asks for the page again, and changes what differs. Nothing moves, loses focus or
   closes; strangers' text arrives escaped and stays text. */
"use strict";
(() => {
  const LOST_AFTER = 8;  // s without an answer until it is said
  const SLOWEST = 30;  // s between two tries
  const poll = location.protocol === "file:" ? 0 : Number(document.body.dataset.poll);
  const lost = document.getElementById("lost");
  let tag = document.body.dataset.tag;
  let ahead = 0;  // s that the server's clock is ahead of this one
  let heard = performance.now();  // ms, when the server answered last
  let failures = 0;
  let timer = 0;

  function duration(seconds) {
    const s = Math.max(0, Math.round(seconds));
    if (s < 90) return `${s} s`;
    if (s < 3570) return `${Math.round(s / 60)} min`;
    if (s < 129600) return `${Math.round(s / 3600)} h`;
    return `${Math.round(s / 86400)} d`;
  }

  function tellTimes() {
    const now = Date.now() / 1000 + ahead;
    for (const each of document.querySelectorAll("time[data-time]")) {
      const time = Number(each.dataset.time), age = now - time;
      const told = age < 5 ? "just now" : `${duration(age)} ago`;
      if (each.textContent !== told) each.textContent = told;
      if (!each.title) each.title = new Date(1000 * time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "long" });
    }
  }

  function tellLost() {
    const silence = (performance.now() - heard) / 1000;
    const isLost = poll > 0 && failures > 0 && silence > LOST_AFTER;
    if (isLost) {
      const words = `No connection to the server: this is what it said ${duration(silence)} ago. Trying again by itself.`;
      if (lost.textContent !== words) lost.textContent = words;
    }
    lost.hidden = !isLost;
  }

  /* Make `old` what `fresh` is, node by node, and touch nothing that is equal already. */
  function morph(old, fresh) {
    if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
      old.replaceWith(document.importNode(fresh, true));
      return;
    }
    if (old.nodeType === Node.TEXT_NODE) {
      if (old.data !== fresh.data) old.data = fresh.data;
      return;
    }
    if (old.nodeType !== Node.ELEMENT_NODE || old.hasAttribute("data-keep")) return;
    attributes(old, fresh);
    const before = [...old.childNodes], after = [...fresh.childNodes];
    after.forEach((node, i) => before[i] ? morph(before[i], node) : old.append(document.importNode(node, true)));
    before.slice(after.length).forEach((node) => node.remove());
  }

  function attributes(old, fresh) {
    for (const { name, value } of [...fresh.attributes]) {
      if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    }
    for (const { name } of [...old.attributes]) {
      const isReaders = name === "open";  // what somebody has opened stays open
      if (!isReaders && !fresh.hasAttribute(name)) old.removeAttribute(name);
    }
  }

  function take(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html");
    if (!fresh.body.dataset.tag || fresh.body.dataset.tag === document.body.dataset.tag) return;
    if (fresh.body.dataset.assets !== document.body.dataset.assets) {  // the kit was updated
      location.reload();
      return;
    }
    document.title = fresh.title;
    morph(document.body, fresh.body);
    tellTimes();
    draw();
  }

  function draw() {
    const curves = document.getElementById("curves");  // the landing page has none
    if (curves) Charts.show(JSON.parse(curves.textContent));
  }

  async function look() {
    clearTimeout(timer);
    try {
      const answer = await fetch(location.pathname + location.search, {
        headers: { Accept: "text/html", ...(tag ? { "If-None-Match": tag } : {}) }, cache: "no-store", signal: AbortSignal.timeout(10000),
      });
      if (!answer.ok && answer.status !== 304) throw new Error(String(answer.status));
      const date = Date.parse(answer.headers.get("Date"));
      if (date) ahead = date / 1000 - Date.now() / 1000;
      if (answer.status === 200) {
        take(await answer.text());
        tag = answer.headers.get("ETag") || "";
      }
      heard = performance.now();
      failures = 0;
    } catch (error) {
      failures += 1;
    }
    tellLost();
    const pause = Math.min(SLOWEST, poll * 1.5 ** Math.max(0, failures - 3)) * (0.9 + 0.2 * Math.random());
    if (!document.hidden) timer = setTimeout(look, 1000 * Math.max(pause, failures ? 1 : 0));
  }

  draw();
  tellTimes();
  setInterval(() => { tellTimes(); tellLost(); }, 1000);
  if (poll) {
    document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
    addEventListener("online", look);
    look();
  }
})();
