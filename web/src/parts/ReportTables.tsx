/** The tables of the Reports page. Each has a button that downloads its rows as CSV. */
import { Button } from '@mantine/core'

import { useJobAddresses } from '../api/addresses'
import type { Report, ReportFigures } from '../contract'
import { count } from '../model/format'
import {
  bucketWords,
  busyBuckets,
  csvOf,
  hours,
  isHourly,
  isoDay,
  money,
  ratio,
  recomputedSteps,
  span,
  type CsvKind,
} from '../model/reports'
import { causeTitle } from '../model/causes'
import { REPORTS } from '../words/reports'
import { FleetLink, JobLink } from './Basics'
import { Card } from './Card'
import { download } from './download'
import { Table, type Column } from './Table'

/** On a phone, a table with more columns than this scrolls sideways. Other tables show the cells of a row as a list. */
const MOST_STACKED = 6

function CsvButton({ report, kind }: { report: Report; kind: CsvKind }) {
  return (
    <Button
      size="compact-xs"
      variant="default"
      aria-label={REPORTS.csv.label(kind)}
      onClick={() =>
        download(
          `everstep-${kind}-${isoDay(report.StartTime)}-${isoDay(report.EndTime - 1)}.csv`,
          [csvOf(report, kind)],
          'text/csv',
        )
      }
    >
      {REPORTS.csv.button}
    </Button>
  )
}

interface Props<T> {
  report: Report
  kind: CsvKind
  rows: readonly T[]
  columns: readonly (Column<T> | false)[]
  keyOf: (row: T) => string | number
}

function ReportTable<T>({ report, kind, rows, columns, keyOf }: Props<T>) {
  const title = REPORTS.tables[kind]
  return (
    <Card title={title} isFlush actions={rows.length > 0 && <CsvButton report={report} kind={kind} />}>
      {rows.length ? (
        <Table
          label={title}
          {...{ rows, columns, keyOf }}
          rowOf={(row) => ({ 'data-row': String(keyOf(row)) })}
          isStacked={columns.length <= MOST_STACKED}
        />
      ) : (
        <p className="dim empty">{REPORTS.tables.none[kind]}</p>
      )}
    </Card>
  )
}

const COLUMNS = REPORTS.columns

interface Counted {
  Figures: ReportFigures
}
/** The columns of figures that all tables of groups (such as projects) have in common. */
const common: readonly Column<Counted>[] = [
  [COLUMNS.nodeHours, ({ Figures }) => hours(Figures.NodeSeconds), 'n'],
  [COLUMNS.ettr, ({ Figures }) => ratio(Figures.EttrRatio), 'n'],
  [COLUMNS.cost, ({ Figures }) => money(Figures.CostUsd), 'n'],
  [COLUMNS.failureCost, ({ Figures }) => money(Figures.Failures.CostUsd), 'n'],
]
const spareCost: Column<Counted> = [COLUMNS.spareCost, ({ Figures }) => money(Figures.SpareCostUsd), 'n']
const failures: readonly Column<Counted>[] = [
  [COLUMNS.failures, ({ Figures }) => count(Figures.Failures.Count), 'n'],
  [COLUMNS.mttf, ({ Figures }) => span(Figures.MttfSeconds), 'n'],
  [COLUMNS.mttr, ({ Figures }) => span(Figures.MttrSeconds), 'n'],
  [COLUMNS.steps, ({ Figures }) => count(recomputedSteps(Figures)), 'n'],
]

export const ProjectTable = ({ report }: { report: Report }) => (
  <ReportTable
    report={report}
    kind="projects"
    rows={report.Projects}
    keyOf={({ Project }) => Project}
    columns={[[COLUMNS.project, ({ Project }) => Project || REPORTS.none, 'name'], ...common]}
  />
)

export const FleetTable = ({ report }: { report: Report }) => (
  <ReportTable
    report={report}
    kind="fleets"
    rows={report.Fleets}
    keyOf={({ FleetName }) => FleetName}
    columns={[[COLUMNS.fleet, ({ FleetName }) => <FleetLink name={FleetName} />, 'name'], ...common, spareCost]}
  />
)

type JobRow = Counted & Partial<Report['Jobs'][number]>

/** The jobs, and at the end one row for all jobs that the report does not name. */
export function JobTable({ report }: { report: Report }) {
  const addressOf = useJobAddresses()
  const { Jobs: jobs, OtherJobs: others } = report
  const name = ({ TrainingJobName, RunId }: JobRow) =>
    TrainingJobName === undefined ? (
      REPORTS.tables.others(report.JobCount - jobs.length)
    ) : (
      <JobLink name={TrainingJobName} address={addressOf({ TrainingJobName, RunId })} />
    )
  return (
    <ReportTable<JobRow>
      report={report}
      kind="jobs"
      rows={[...jobs, ...(others ? [{ Figures: others }] : [])]}
      keyOf={({ RunId = 'others' }) => RunId}
      columns={[
        [COLUMNS.job, name, 'name', ({ RunId }) => ({ className: RunId === undefined ? 'dim' : 'name' })],
        [COLUMNS.project, ({ Project }) => Project || REPORTS.none],
        ...common,
        ...failures,
      ]}
    />
  )
}

export const CauseTable = ({ report }: { report: Report }) => (
  <ReportTable
    report={report}
    kind="causes"
    rows={report.Causes}
    keyOf={({ Cause }) => Cause}
    columns={[
      [COLUMNS.cause, ({ Cause }) => causeTitle(Cause), 'name'],
      [COLUMNS.kind, ({ Kind }) => REPORTS.kinds[Kind] ?? Kind],
      [COLUMNS.count, ({ Incidents }) => count(Incidents.Count), 'n'],
      [
        COLUMNS.mean,
        ({ Incidents: { RecoveredCount: recovered, RecoverySeconds } }) =>
          span(recovered ? RecoverySeconds / recovered : undefined),
        'n',
      ],
      [COLUMNS.steps, ({ Incidents }) => count(Incidents.RecomputedSteps), 'n'],
      [COLUMNS.cost, ({ Incidents }) => money(Incidents.CostUsd), 'n'],
    ]}
  />
)

export function BucketTable({ report }: { report: Report }) {
  const hasHours = isHourly(report.Buckets.map((each) => ({ start: each.StartTime, end: each.EndTime })))
  return (
    <ReportTable
      report={report}
      kind="buckets"
      rows={busyBuckets(report).toReversed()}
      keyOf={({ StartTime }) => StartTime}
      columns={[
        [COLUMNS.from, ({ StartTime }) => bucketWords(StartTime, hasHours), 'moment'],
        ...common,
        spareCost,
        ...failures,
      ]}
    />
  )
}
