/** Time, cost and incidents over a time range. The range and the filters are in the URL. */
import { NativeSelect, SegmentedControl, TextInput } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'

import { serverTime } from '../api/client'
import { fleetsQuery, jobsQuery, reportQuery } from '../api/queries'
import { TrendChart } from '../charts/TrendChart'
import type { Report, ReportFigures } from '../contract'
import { count, plural, utc } from '../model/format'
import {
  axisOf,
  costBars,
  costParts,
  ettrBars,
  hours,
  isEmpty,
  isoDay,
  money,
  moneyTick,
  mttfBars,
  mttrBars,
  ratio,
  ratioTick,
  recomputedSteps,
  span,
  spanOf,
  timeAxisOf,
  timeTick,
} from '../model/reports'
import { Empty, Shown } from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { PageHead, type VerdictLine } from '../parts/PageHead'
import { BucketTable, CauseTable, FleetTable, JobTable, ProjectTable } from '../parts/ReportTables'
import { useAddress } from '../parts/address'
import { REPORTS } from '../words/reports'

const PERIODS = ['Hour', 'Day', 'Week'] as const
const MAX_JOBS = 20

export default function ReportsPage() {
  useDocumentTitle('Reports, Everstep')
  const [search] = useAddress()
  const period = PERIODS.find((each) => each === search.get('period'))
  const keys = ['range', 'from', 'to', 'period', 'project', 'fleet'].map((name) => search.get(name) ?? '')
  const query = useQuery(
    reportQuery(keys, () => {
      const { start, end } = spanOf(search, serverTime())
      return {
        StartTime: start,
        EndTime: end,
        Period: period,
        Project: search.get('project') ?? undefined,
        FleetName: search.get('fleet') ?? undefined,
        MaxJobs: MAX_JOBS,
      }
    }),
  )
  return (
    <div className="stack">
      <PageHead title={REPORTS.title} verdict={query.data && verdictOf(query.data)} />
      <Filters report={query.data} />
      <Shown query={query} rows={10}>
        {(report) =>
          isEmpty(report) ? (
            <Empty title={REPORTS.empty.title} command="everstep reports show">
              {REPORTS.empty.text}
            </Empty>
          ) : (
            <Whole report={report} />
          )
        }
      </Shown>
    </div>
  )
}

function verdictOf(report: Report): VerdictLine {
  const { EttrRatio, CostUsd, SpareCostUsd, Failures } = report.Total
  const words = REPORTS.verdict
  if (EttrRatio === undefined) return { tone: 'idle', lead: words.idle }
  const isPriced = CostUsd !== undefined
  const text = isPriced
    ? words.cost(money(CostUsd), money(Failures.CostUsd ?? 0), money(SpareCostUsd ?? 0))
    : words.unpriced
  return { tone: 'idle', lead: words.lead(ratio(EttrRatio)), text }
}

function Filters({ report }: { report?: Report }) {
  const [search, set] = useAddress()
  const project = search.get('project') ?? ''
  const fleet = search.get('fleet') ?? ''
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data ?? []
  const fleets = useQuery({ ...fleetsQuery, refetchInterval: false }).data ?? []
  const projects = [...new Set([...jobs.map((job) => job.Project), ...(project ? [project] : [])])].sort()
  const names = [...new Set([...fleets.map((each) => each.FleetName), ...(fleet ? [fleet] : [])])].sort()
  const { range } = spanOf(search, serverTime())
  const isCustom = search.get('range') === 'custom'
  const choose = (next: string) =>
    next === 'custom' && report
      ? set({ range: next, from: isoDay(report.StartTime), to: isoDay(report.EndTime - 1) })
      : set({ range: next === '7d' ? '' : next, from: '', to: '' })
  return (
    <div className="row">
      <SegmentedControl
        size="xs"
        aria-label={REPORTS.range.label}
        value={isCustom ? 'custom' : range}
        onChange={choose}
        data={Object.entries(REPORTS.range.names).map(([value, label]) => ({ value, label }))}
      />
      {isCustom && (
        <>
          <TextInput
            type="date"
            size="xs"
            aria-label={REPORTS.range.from}
            value={search.get('from') ?? ''}
            onChange={(event) => set({ from: event.currentTarget.value })}
          />
          <TextInput
            type="date"
            size="xs"
            aria-label={REPORTS.range.to}
            value={search.get('to') ?? ''}
            onChange={(event) => set({ to: event.currentTarget.value })}
          />
        </>
      )}
      <NativeSelect
        size="xs"
        aria-label={REPORTS.period.label}
        value={search.get('period') ?? ''}
        data={Object.entries(REPORTS.period.names).map(([value, label]) => ({ value, label }))}
        onChange={(event) => set({ period: event.currentTarget.value })}
      />
      <NativeSelect
        size="xs"
        aria-label={REPORTS.project.label}
        value={project}
        data={[{ value: '', label: REPORTS.project.any }, ...projects.filter(Boolean)]}
        onChange={(event) => set({ project: event.currentTarget.value })}
      />
      <NativeSelect
        size="xs"
        aria-label={REPORTS.fleet.label}
        value={fleet}
        data={[{ value: '', label: REPORTS.fleet.any }, ...names]}
        onChange={(event) => set({ fleet: event.currentTarget.value })}
      />
      {report && (
        <span className="dim">
          {REPORTS.range.shown(utc(report.StartTime).slice(0, 16), utc(report.EndTime).slice(0, 16))}
        </span>
      )}
    </div>
  )
}

function Whole({ report }: { report: Report }) {
  return (
    <>
      <Totals total={report.Total} />
      <Trends report={report} />
      <div className="split">
        <ProjectTable report={report} />
        <FleetTable report={report} />
      </div>
      <JobTable report={report} />
      <CauseTable report={report} />
      <BucketTable report={report} />
    </>
  )
}

function Totals({ total }: { total: ReportFigures }) {
  const words = REPORTS.figures
  const unpriced = total.UnpricedNodeSeconds ? `, ${words.unpriced(hours(total.UnpricedNodeSeconds))}` : ''
  return (
    <div className="totals">
      <Card label={words.title}>
        <Figures
          isLarge
          figures={[
            { label: words.ettr, name: 'report-ettr', value: ratio(total.EttrRatio), note: words.ettrNote },
            {
              label: words.cost,
              name: 'report-cost',
              value: money(total.CostUsd),
              note: words.costNote(hours(total.NodeSeconds), hours(total.RankSeconds)) + unpriced,
            },
            {
              label: words.failureCost,
              name: 'report-failure-cost',
              value: money(total.Failures.CostUsd),
              note: words.failureCostNote,
            },
            {
              label: words.spareCost,
              name: 'report-spare-cost',
              value: money(total.SpareCostUsd),
              note: words.spareCostNote(money(total.OtherIdleCostUsd)),
            },
            {
              label: words.mttf,
              name: 'report-mttf',
              value: span(total.MttfSeconds),
              note: words.mttfNote(total.Failures.Count),
            },
            {
              label: words.mttr,
              name: 'report-mttr',
              value: span(total.MttrSeconds),
              note: words.mttrNote(total.Failures.RecoveredCount),
            },
            {
              label: words.steps,
              name: 'report-recomputed-steps',
              value: count(recomputedSteps(total)),
              note: words.stepsNote,
            },
            {
              label: words.drills,
              name: 'report-drills',
              value: count(total.Drills.Count),
              note: total.Drills.Count
                ? words.drillsNote(money(total.Drills.CostUsd), plural(total.Drills.RecomputedSteps, 'recomputed step'))
                : undefined,
            },
          ]}
        />
      </Card>
    </div>
  )
}

function Trends({ report }: { report: Report }) {
  const words = REPORTS.trends
  const costs = costBars(report)
  const greatest = (parts: number[][]) => Math.max(0, ...parts.map((each) => each.reduce((sum, part) => sum + part, 0)))
  const mttf = mttfBars(report)
  const mttr = mttrBars(report)
  const { Total } = report
  const cost = costParts(Total)
  return (
    <div className="trends">
      <Card>
        <TrendChart
          title={words.ettr}
          bars={ettrBars(report)}
          axis={[0, 0.5, 1]}
          format={ratio}
          tick={ratioTick}
          summary={ratio(Total.EttrRatio)}
          colors={['--b-train']}
        />
      </Card>
      <Card>
        <TrendChart
          title={words.cost}
          bars={costs}
          axis={axisOf(greatest(costs.map((each) => each.parts)))}
          format={money}
          tick={moneyTick}
          summary={money(
            cost.every((part) => part === undefined)
              ? undefined
              : cost.reduce<number>((sum, part) => sum + (part ?? 0), 0),
          )}
          parts={words.costParts}
          colors={['--b-train', '--b-detect', '--b-queue']}
        />
      </Card>
      <Card>
        <TrendChart
          title={words.mttf}
          bars={mttf}
          axis={timeAxisOf(greatest(mttf.map((each) => each.parts)))}
          format={span}
          tick={timeTick}
          summary={span(Total.MttfSeconds)}
          colors={['--b-start']}
        />
      </Card>
      <Card>
        <TrendChart
          title={words.mttr}
          bars={mttr}
          axis={timeAxisOf(greatest(mttr.map((each) => each.parts)))}
          format={span}
          tick={timeTick}
          summary={span(Total.MttrSeconds)}
          colors={['--b-replace']}
        />
      </Card>
    </div>
  )
}
