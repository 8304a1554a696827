/* Buttons with data-copy put their text onto the clipboard. Without a clipboard (an http address that is not this
   machine) they select the lines, so that Ctrl-C copies them. */
"use strict";
(() => {
  const SAID_FOR = 2000;  // ms
  document.documentElement.classList.add("js");  // without scripts there are no such buttons

  function say(button, words) {
    const before = button.dataset.label || button.textContent;
    button.dataset.label = before;
    button.textContent = words;
    setTimeout(() => { button.textContent = before; }, SAID_FOR);
  }

  function select(button) {
    const lines = button.closest(".lines").querySelector("pre");
    getSelection().selectAllChildren(lines);
    say(button, "Selected: press Ctrl-C");
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    try {
      await navigator.clipboard.writeText(button.dataset.copy);
      say(button, "Copied");
    } catch {
      select(button);
    }
  });
})();
