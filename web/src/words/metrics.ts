/** Every text of a job's Metrics tab. */
import { count, plural } from '../model/format'

export const METRICS = {
  axis: { label: 'Horizontal axis', step: 'Steps', wall: 'Time', elapsed: 'Elapsed', tokens: 'Tokens' },
  range: {
    label: 'Range',
    all: 'All',
    zoomed: 'Zoomed',
    steps: (steps: number) => `Last ${count(steps)} steps`,
    time: (seconds: number) => `Last ${seconds < 3600 ? `${seconds / 60} min` : plural(seconds / 3600, 'hour')}`,
    reset: 'Reset zoom',
  },
  smoothing: { label: 'Smoothing', none: 'No smoothing', weight: (weight: number) => `Smoothing ${weight}` },
  log: 'Log scale',
  zone: { label: 'Time zone', utc: 'UTC', local: 'Local time' },
  filter: { label: 'Filter metrics', placeholder: 'Filter metrics' },
  csv: 'CSV',
  compare: {
    label: 'Compare with a job',
    placeholder: 'Compare with…',
    runs: 'Compared jobs',
    remove: (name: string) => `Remove ${name} from the comparison`,
    title: 'Differences between the jobs',
    setting: 'Setting',
    none: 'The jobs have the same hyperparameters and settings.',
    unset: 'not set',
    missing: (name: string) => `No metrics of ${name} can be read.`,
  },
  pinned: 'Pinned',
  chart: {
    pin: (title: string) => `Pin ${title}`,
    unpin: (title: string) => `Unpin ${title}`,
    maximise: (title: string) => `Maximise ${title}`,
    restore: (title: string) => `Show all charts instead of ${title} alone`,
    table: (title: string) => `Values of ${title} as a table`,
    spread: (low: string, high: string) => `${low} to ${high}`,
    on: (value: string, node: string) => `${value} on ${node}`,
    summary: (title: string, points: number, axis: string, from: string, to: string, last: string) =>
      `${title} over ${points} ${axis}, from ${from} to ${to}, last ${last}`,
    empty: (title: string) => `${title} has no points in this range`,
    units: { step: 'steps', wall: 'times', elapsed: 'times', tokens: 'token counts' },
    columns: { position: 'Position', mean: 'Mean', low: 'Minimum', high: 'Maximum' },
  },
  faults: {
    title: 'Failures in these charts',
    mark: (numbers: string, causes: string) => `Failure ${numbers}: ${causes}`,
    more: (hidden: number) => `and ${count(hidden)} earlier`,
  },
  series: {
    toggle: { Node: 'Per node', Rank: 'Per rank' },
    of: (words: string, title: string) => `${words}: ${title}`,
    rank: (rank: number) => `rank ${rank}`,
    legend: (title: string) => `Lines of ${title} that stand out`,
    others: (hidden: number) => `${plural(hidden, 'more line')} in grey`,
    tooMany: (nodes: number, most: number) =>
      `Lines per node are stored for up to ${most} nodes; this job has ${count(nodes)}.`,
    failed: (message: string) => `The lines cannot be read: ${message}`,
  },
  extremes: { least: 'Lowest on', most: 'Highest on' },
  help: 'Drag across a chart to zoom all charts. Double-click to see everything. The shade spans minimum and maximum.',
  ownHelp: 'The line is the median of all nodes. Each value is a mean of about five seconds.',
  noMatch: 'No metric has this in its name.',
  empty: {
    title: 'No metrics yet',
    text: 'Rank 0 logs values in the training loop. They appear here within seconds.',
    command: 'session.log(loss=loss.item())',
  },
} as const
