/** The tables of the Reports page. Each has a button that downloads its rows as CSV. */
import { Button } from '@mantine/core'
import type { ReactNode } from 'react'

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
import { JobLink } from './Basics'
import { Card } from './Card'
import { download } from './download'

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

function Table({
  report,
  kind,
  head,
  children,
  isEmptyText,
}: {
  report: Report
  kind: CsvKind
  head: [string, boolean][]
  children: ReactNode[]
  isEmptyText?: string
}) {
  const title = REPORTS.tables[kind]
  return (
    <Card title={title} isFlush actions={children.length > 0 && <CsvButton report={report} kind={kind} />}>
      {children.length ? (
        <div className="scroll" tabIndex={0} role="region" aria-label={title}>
          <table className={head.length > MOST_STACKED ? 'grid' : 'grid stacked'}>
            <thead>
              <tr>
                {head.map(([name, isNumber]) => (
                  <th key={name} className={isNumber ? 'n' : undefined}>
                    {name}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>{children}</tbody>
          </table>
        </div>
      ) : (
        <p className="dim empty">{isEmptyText}</p>
      )}
    </Card>
  )
}

/** The cells that all tables of groups (such as projects) have in common. */
function cells(figures: ReportFigures, hasIdle: boolean): [string, string][] {
  const { columns } = REPORTS
  return [
    [columns.nodeHours, hours(figures.NodeSeconds)],
    [columns.ettr, ratio(figures.EttrRatio)],
    [columns.cost, money(figures.CostUsd)],
    [columns.failureCost, money(figures.Failures.CostUsd)],
    ...(hasIdle ? ([[columns.spareCost, money(figures.SpareCostUsd)]] as [string, string][]) : []),
  ]
}

const numbers = (found: [string, string][]): ReactNode[] =>
  found.map(([name, value]) => (
    <td key={name} className="n" data-name={name}>
      {value}
    </td>
  ))

interface GroupProps {
  report: Report
  kind: 'projects' | 'fleets'
  name: string
  /** Key, name and figures of each row. */
  rows: [string, ReactNode, ReportFigures][]
  hasIdle?: boolean
}

export function GroupTable({ report, kind, name, rows, hasIdle = false }: GroupProps) {
  const head: [string, boolean][] = [
    [name, false],
    ...cells(report.Total, hasIdle).map(([label]): [string, boolean] => [label, true]),
  ]
  return (
    <Table report={report} kind={kind} head={head} isEmptyText={REPORTS.tables.none[kind]}>
      {rows.map(([key, shown, figures]) => (
        <tr key={key} data-row={key}>
          <td className="name" data-name={name}>
            {shown}
          </td>
          {numbers(cells(figures, hasIdle))}
        </tr>
      ))}
    </Table>
  )
}

export function JobTable({ report }: { report: Report }) {
  const addressOf = useJobAddresses()
  const { columns, tables } = REPORTS
  const more = (figures: ReportFigures): [string, string][] => [
    ...cells(figures, false),
    [columns.failures, count(figures.Failures.Count)],
    [columns.mttf, span(figures.MttfSeconds)],
    [columns.mttr, span(figures.MttrSeconds)],
    [columns.steps, count(recomputedSteps(figures))],
  ]
  const head: [string, boolean][] = [
    [columns.job, false],
    [columns.project, false],
    ...more(report.Total).map(([label]): [string, boolean] => [label, true]),
  ]
  return (
    <Table report={report} kind="jobs" head={head} isEmptyText={tables.none.jobs}>
      {report.Jobs.map((job) => (
        <tr key={job.RunId} data-row={job.RunId}>
          <td className="name" data-name={columns.job}>
            <JobLink name={job.TrainingJobName} address={addressOf(job)} />
          </td>
          <td data-name={columns.project}>{job.Project || REPORTS.none}</td>
          {numbers(more(job.Figures))}
        </tr>
      )).concat(
        report.OtherJobs
          ? [
              <tr key="others" data-row="others">
                <td data-name={columns.job} className="dim">
                  {tables.others(report.JobCount - report.Jobs.length)}
                </td>
                <td data-name={columns.project}>{REPORTS.none}</td>
                {numbers(more(report.OtherJobs))}
              </tr>,
            ]
          : [],
      )}
    </Table>
  )
}

export function CauseTable({ report }: { report: Report }) {
  const { columns, tables, kinds } = REPORTS
  const names: [string, boolean][] = [
    [columns.cause, false],
    [columns.kind, false],
    [columns.count, true],
    [columns.mean, true],
    [columns.steps, true],
    [columns.cost, true],
  ]
  return (
    <Table report={report} kind="causes" head={names} isEmptyText={tables.none.causes}>
      {report.Causes.map(({ Cause, Kind, Incidents }) => (
        <tr key={Cause} data-row={Cause}>
          <td className="name" data-name={columns.cause}>
            {causeTitle(Cause)}
          </td>
          <td data-name={columns.kind}>{kinds[Kind] ?? Kind}</td>
          {numbers([
            [columns.count, count(Incidents.Count)],
            [
              columns.mean,
              span(Incidents.RecoveredCount ? Incidents.RecoverySeconds / Incidents.RecoveredCount : undefined),
            ],
            [columns.steps, count(Incidents.RecomputedSteps)],
            [columns.cost, money(Incidents.CostUsd)],
          ])}
        </tr>
      ))}
    </Table>
  )
}

export function BucketTable({ report }: { report: Report }) {
  const { columns } = REPORTS
  const hasHours = isHourly(report.Buckets.map((each) => ({ start: each.StartTime, end: each.EndTime })))
  const more = (figures: ReportFigures): [string, string][] => [
    ...cells(figures, true),
    [columns.failures, count(figures.Failures.Count)],
    [columns.mttf, span(figures.MttfSeconds)],
    [columns.mttr, span(figures.MttrSeconds)],
    [columns.steps, count(recomputedSteps(figures))],
  ]
  const head: [string, boolean][] = [
    [columns.from, false],
    ...more(report.Total).map(([label]): [string, boolean] => [label, true]),
  ]
  return (
    <Table report={report} kind="buckets" head={head} isEmptyText={REPORTS.tables.none.buckets}>
      {busyBuckets(report)
        .toReversed()
        .map(({ StartTime, Figures: figures }) => (
          <tr key={StartTime} data-row={StartTime}>
            <td className="moment" data-name={columns.from}>
              {bucketWords(StartTime, hasHours)}
            </td>
            {numbers(more(figures))}
          </tr>
        ))}
    </Table>
  )
}
