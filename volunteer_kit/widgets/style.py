"""The look: light and dark, in JupyterLab, Notebook, Colab, VS Code, and in a page that is just a page."""

STYLE = """<style>
.vk { --vk-text: var(--jp-content-font-color1, #1f2430); --vk-soft: #5b6472; --vk-line: #dfe3e8; --vk-card: #f5f7f9;
  --vk-accent: #2266cc; --vk-fill: rgba(34,102,204,.13); --vk-good: #1f8a4c; --vk-busy: #b7791f; --vk-still: #76808f;
  --vk-bad: #c5362c; --vk-warn: #fdf3e1;
  color: var(--vk-text); font: 14px/1.45 var(--jp-content-font-family, system-ui, "Segoe UI", sans-serif);
  max-width: 760px; margin: 0; text-align: left; overflow-wrap: anywhere; }
@media (prefers-color-scheme: dark) { .vk { --vk-text: #e6e9ee; --vk-soft: #a3adba; --vk-line: #3a4250;
  --vk-card: rgba(255,255,255,.055); --vk-accent: #7fb2ff; --vk-fill: rgba(127,178,255,.16); --vk-good: #4cc38a;
  --vk-busy: #e5b567; --vk-still: #98a2b0; --vk-bad: #ff7b72; --vk-warn: rgba(229,181,103,.14); } }
[data-jp-theme-light="true"] .vk, [theme=light] .vk, .vscode-light .vk { --vk-text: #1f2430; --vk-soft: #5b6472;
  --vk-line: #dfe3e8; --vk-card: #f5f7f9; --vk-accent: #2266cc; --vk-fill: rgba(34,102,204,.13); --vk-good: #1f8a4c;
  --vk-busy: #b7791f; --vk-still: #76808f; --vk-bad: #c5362c; --vk-warn: #fdf3e1; }
[data-jp-theme-light="false"] .vk, [theme=dark] .vk, .vscode-dark .vk { --vk-text: #e6e9ee; --vk-soft: #a3adba;
  --vk-line: #3a4250; --vk-card: rgba(255,255,255,.055); --vk-accent: #7fb2ff; --vk-fill: rgba(127,178,255,.16);
  --vk-good: #4cc38a; --vk-busy: #e5b567; --vk-still: #98a2b0; --vk-bad: #ff7b72; --vk-warn: rgba(229,181,103,.14); }
.vk * { box-sizing: border-box; }
.vk a { color: var(--vk-accent); text-decoration: underline; text-underline-offset: 2px; }
.vk-run { display: flex; justify-content: space-between; gap: 12px; color: var(--vk-soft); font-size: 13px; }
.vk-run b { color: var(--vk-text); font-weight: 600; }
.vk-state { display: flex; align-items: baseline; gap: 10px; margin: 8px 0 0; font-size: 21px; line-height: 1.3;
  font-weight: 600; min-height: 28px; }
.vk-dot { flex: none; width: 12px; height: 12px; border-radius: 50%; align-self: center; background: var(--vk-still); }
.vk-good { background: var(--vk-good); box-shadow: 0 0 0 4px rgba(60,170,110,.18); }
.vk-busy { background: var(--vk-busy); box-shadow: 0 0 0 4px rgba(214,158,46,.18); }
.vk-bad { background: var(--vk-bad); box-shadow: 0 0 0 4px rgba(220,80,70,.18); }
.vk-meaning { color: var(--vk-soft); margin: 2px 0 12px 22px; min-height: 20px; white-space: pre-line; }
.vk-bar { height: 8px; border-radius: 4px; background: var(--vk-line); overflow: hidden; margin: 4px 0 14px; }
.vk-bar i { display: block; height: 100%; border-radius: 4px; background: var(--vk-accent); transition: width .4s; }
.vk-bar i.vk-unknown { width: 100%; opacity: .35; }
.vk-small { color: var(--vk-soft); font-size: 13px; font-variant-numeric: tabular-nums; }
.vk-facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 8px; margin: 0 0 14px; }
.vk-fact { background: var(--vk-card); border-radius: 8px; padding: 8px 12px; min-height: 76px; }
.vk-fact span { display: block; color: var(--vk-soft); font-size: 12.5px; }
.vk-fact b { display: block; font-size: 19px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.vk-chart { display: block; width: 100%; height: auto; margin: 2px 0 6px; }
.vk-chart text { fill: var(--vk-soft); font-size: 12px; font-family: inherit; font-variant-numeric: tabular-nums; }
.vk-chart .vk-title { fill: var(--vk-text); font-size: 13px; font-weight: 600; }
.vk-grid { stroke: var(--vk-line); stroke-width: 1; }
.vk-curve { fill: none; stroke: var(--vk-accent); stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.vk-area { fill: var(--vk-fill); stroke: none; }
.vk-end { fill: var(--vk-accent); }
.vk-warnings { min-height: 22px; margin: 4px 0; }
.vk-warnings div { background: var(--vk-warn); border-left: 3px solid var(--vk-busy); border-radius: 4px;
  padding: 4px 10px; margin: 4px 0; font-size: 13px; }
.vk details { margin: 6px 0; font-size: 13px; } .vk summary { cursor: pointer; color: var(--vk-soft); }
.vk details p { margin: 6px 0 6px 16px; }
.vk-pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(112px, 1fr)); gap: 10px; margin: 6px 0; }
.vk-pictures figure { margin: 0; } .vk-pictures img { width: 100%; aspect-ratio: 1; border-radius: 6px; display: block;
  margin: 0; object-fit: cover; image-rendering: auto; background: var(--vk-card); }
.vk-pictures figcaption { font-size: 12px; line-height: 1.35; color: var(--vk-soft); margin-top: 4px; }
.vk h3 { font-size: 19px; line-height: 1.3; margin: 4px 0 10px; font-weight: 600; color: var(--vk-text); }
.vk .vk-terms { display: grid; grid-template-columns: minmax(110px, 168px) 1fr; gap: 7px 16px; margin: 0 0 10px; }
.vk .vk-terms dt { color: var(--vk-soft); font-weight: 400; }
.vk .vk-terms :is(dt, dd) { margin: 0; float: none; width: auto; }  /* JupyterLab lets them float */
.vk .vk-terms .vk-notice { background: var(--vk-warn); border-left: 3px solid var(--vk-busy); border-radius: 4px;
  padding: 4px 10px; }
.vk-code { font: 600 22px/1.4 var(--jp-code-font-family, ui-monospace, monospace); letter-spacing: .14em; }
.vk-error { color: var(--vk-bad); white-space: pre-line; min-height: 20px; }
</style>"""
