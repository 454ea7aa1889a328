/** Every text of the Reports page. */
import type { CsvKind, Range } from '../model/reports'
import { plural } from '../model/format'

export const REPORTS = {
  title: 'Reports',
  none: '–',
  verdict: {
    lead: (ettr: string) => `Jobs trained for ${ettr} of their time with nodes.`,
    idle: 'No job had nodes in this time range.',
    cost: (jobs: string, failures: string, spares: string) =>
      `They cost ${jobs}. Failures cost ${failures} of it, and idle spares ${spares} more.`,
    unpriced:
      'No fleet has a price, so the report has no costs. Set one with everstep fleets update --price-usd-per-hour.',
  },
  range: {
    label: 'Time range',
    names: { '24h': '24 h', '7d': '7 days', '30d': '30 days', '90d': '90 days', custom: 'Custom' } satisfies Record<
      Range,
      string
    >,
    from: 'First day (UTC)',
    to: 'Last day (UTC)',
    shown: (from: string, to: string) => `${from} to ${to} UTC`,
  },
  period: { label: 'Length of a bucket', names: { '': 'Automatic', Hour: 'Hours', Day: 'Days', Week: 'Weeks' } },
  project: { label: 'Project', any: 'Any project' },
  fleet: { label: 'Fleet', any: 'Any fleet' },
  csv: { button: 'CSV', label: (kind: CsvKind) => `Download ${kind} as CSV` },
  figures: {
    title: 'Totals',
    ettr: 'ETTR',
    ettrNote: 'training ÷ time with nodes',
    cost: 'Cost of jobs',
    costNote: (nodeHours: string, rankHours: string) => `${nodeHours} node hours, ${rankHours} rank hours`,
    unpriced: (nodeHours: string) => `without ${nodeHours} node hours of fleets that have no price`,
    failureCost: 'Cost of failures',
    failureCostNote: 'detect, replace, restore and rework',
    spareCost: 'Cost of idle spares',
    spareCostNote: (other: string) => `other idle nodes: ${other}`,
    mttf: 'MTTF',
    mttfNote: (count: number) => plural(count, 'failure'),
    mttr: 'MTTR',
    mttrNote: (count: number) => `${plural(count, 'recovery', 'recoveries')}`,
    steps: 'Recomputed steps',
    stepsNote: 'without drills',
    drills: 'Drills',
    drillsNote: (cost: string, steps: string) => `${cost}, ${steps}`,
  },
  trends: {
    ettr: 'ETTR',
    cost: 'Cost',
    costParts: ['Work', 'Failures', 'Idle nodes'],
    mttf: 'Mean time to failure',
    mttr: 'Mean time to recovery',
    none: 'no value',
    aria: (title: string, count: number, range: string) =>
      `${title} in ${plural(count, 'bucket')}, ${range}. The table of trends has the figures.`,
  },
  tables: {
    buckets: 'Trend, without empty buckets',
    projects: 'Cost by project',
    fleets: 'Cost by fleet',
    jobs: 'Cost by job',
    causes: 'Incidents by cause',
    none: {
      buckets: 'Every bucket is empty.',
      projects: 'No project has a job in this time range.',
      fleets: 'No fleet matches.',
      jobs: 'No job overlaps this time range.',
      causes: 'No incident occurred in this time range.',
    },
    others: (count: number) => `${plural(count, 'other job')}`,
  },
  columns: {
    from: 'From (UTC)',
    project: 'Project',
    fleet: 'Fleet',
    job: 'Job',
    ettr: 'ETTR',
    nodeHours: 'Node hours',
    cost: 'Cost',
    failures: 'Failures',
    failureCost: 'Cost of failures',
    spareCost: 'Idle spares',
    mttf: 'MTTF',
    mttr: 'MTTR',
    steps: 'Recomputed steps',
    cause: 'Cause',
    kind: 'Kind',
    count: 'Incidents',
    mean: 'Mean recovery',
  },
  kinds: { Failure: 'Failure', Planned: 'Planned stop', Drill: 'Drill' } as Readonly<Record<string, string>>,
  empty: {
    title: 'Nothing ran in this time range',
    text: 'The report has figures once a job or a spare has existed in the range. Choose a longer range.',
  },
} as const
