"""Style of the page: plain CSS over the theme's own variables, which have a light and a dark value each."""

CSS = """
.rx { --rx-soft: var(--neutral-500); --rx-mark: #0072B2; --rx-line: var(--border-color-primary);
  color: var(--body-text-color); font-size: 15px; line-height: 1.45; }
.dark .rx { --rx-soft: var(--neutral-400); --rx-mark: #56B4E9; }
.gradio-container .html-container:has(.rx) { padding-left: 0; padding-right: 0; }
.rx h1 { font-size: 1.6rem; font-weight: 650; margin: 0; }
.rx h2 { font-size: 1.15rem; font-weight: 650; margin: 1.75rem 0 .5rem; }
.rx h3 { font-size: .95rem; font-weight: 600; margin: 1rem 0 .3rem; }
.rx p, .rx dl, .rx dd, .rx figure { margin: 0; }
.rx-lead, .rx-note, .rx-hint, .rx-summary { color: var(--rx-soft); }
.rx .rx-lead { margin-top: .25rem; }
.rx .rx-note { margin-bottom: .5rem; }
.rx .rx-hint { font-weight: 400; }
.rx .rx-summary { margin-bottom: .75rem; }
.rx-summary strong { color: var(--body-text-color); font-weight: 600; }

.rx-card {
  display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 1rem 2rem; padding: 1rem 1.2rem;
  margin-bottom: .75rem; border: 1px solid var(--rx-line); border-radius: 10px;
  background: var(--background-fill-primary);
}
.rx-left { display: flex; flex-direction: column; gap: .9rem; min-width: 0; }
.rx-input { overflow-wrap: anywhere; white-space: pre-wrap; }
.rx-input img { max-width: 160px; max-height: 160px; min-width: 64px; border-radius: 6px; }
.rx .rx-chosen { margin-bottom: .35rem; color: var(--rx-soft); overflow-wrap: anywhere; }
.rx-chosen strong { color: var(--body-text-color); font-size: 1.05rem; font-weight: 650; }

.rx-answers { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: .75rem; }
.rx-answer { border-left: 3px solid var(--rx-line); padding-left: .65rem; min-width: 0; }
.rx-answer.rx-retex { border-left-color: var(--rx-mark); }
.rx-answer dt { font-size: .8rem; color: var(--rx-soft); }
.rx-answer dd { overflow-wrap: anywhere; white-space: pre-wrap; }
.rx-retex dd { font-weight: 650; }
.rx-answer dd > * { margin-right: .5rem; }
.rx-score { font-weight: 400; white-space: nowrap; color: var(--rx-soft); font-variant-numeric: tabular-nums; }

.rx table { border-collapse: collapse; font-size: .875rem; }
.rx th { font-weight: 400; text-align: left; }
.rx thead th { color: var(--rx-soft); font-size: .8rem; white-space: nowrap; }
.rx td.rx-number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
.rx-bars { width: 100%; table-layout: fixed; }
.rx-bars th, .rx-bars td { padding: .1rem .6rem .1rem 0; }
.rx-bars th:first-child { width: 34%; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.rx-bars td:nth-child(3) { width: 4rem; }
.rx-bars th:last-child, .rx-bars td:last-child { width: 5.2rem; padding-right: 0; text-align: right; }
.rx-fill { display: block; height: .6rem; min-width: 2px; border-radius: 3px; background: var(--rx-soft); opacity: .5; }
.rx-near .rx-fill { background: var(--rx-mark); opacity: 1; }
.rx .rx-near th, .rx .rx-near td { font-weight: 650; }

.rx-scroll { overflow-x: auto; }
.rx-table th, .rx-table td { padding: .35rem 1.5rem .35rem 0; border-bottom: 1px solid var(--rx-line); }
.rx-table tbody th { font-weight: 600; white-space: nowrap; }
.rx-figures-table thead th:not(:first-child) { text-align: right; }
.rx-distances th, .rx-distances td { padding: .35rem .75rem; }
.rx-distances tbody th { padding-left: 0; }
.rx-distances td.rx-number { background: color-mix(in srgb, var(--rx-mark) calc(var(--near) * 45%), transparent); }

.rx-figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1.25rem; }
.rx-figures .rx-wide { grid-column: 1 / -1; }
.rx figure img { width: 100%; max-width: 60rem; height: auto; border-radius: 8px; background: #fff; }
.rx figcaption { color: var(--rx-soft); font-size: .875rem; margin-top: .3rem; }

#run { align-self: flex-end; max-height: 3.4rem; }
@media (max-width: 760px) {
  .rx-card { grid-template-columns: minmax(0, 1fr); padding: .8rem .9rem; }
  .rx-bars .rx-hint { display: none; }
  .rx-bars td:nth-child(3) { width: 3.2rem; }
}
"""
