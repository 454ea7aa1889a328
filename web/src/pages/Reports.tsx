/** Time, cost and incidents over a time range. The range and the filters are in the URL. */
import { NativeSelect, SegmentedControl, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'

import { serverTime } from '../api/client'
import { fleetsQuery, jobsQuery, reportQuery } from '../api/queries'
import { TrendChart } from '../charts/TrendChart'
import type { Report, ReportFigures } from '../contract'
import { count, plural, utc } from '../model/format'
import {
  axisOf,
  barsOf,
  costParts,
  hours,
  isEmpty,
  isoDay,
  money,
  moneyTick,
  ratio,
  ratioTick,
  recomputedSteps,
  span,
  spanOf,
  timeAxisOf,
  timeTick,
  type Bar,
} from '../model/reports'
import type { VerdictLine } from '../model/standing'
import { Empty, Shown } from '../parts/Basics'
import { Card, Figures } from '../parts/Card'
import { Page } from '../parts/PageHead'
import { BucketTable, CauseTable, FleetTable, JobTable, ProjectTable } from '../parts/ReportTables'
import { useAddress } from '../parts/address'
import { REPORTS } from '../words/reports'

const PERIODS = ['Hour', 'Day', 'Week'] as const
const MAX_JOBS = 20

export default function ReportsPage() {
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
    <Page title={REPORTS.title} verdict={query.data && verdictOf(query.data)}>
      <Filters report={query.data} />
      <Shown query={query} rows={10}>
        {(report) =>
          isEmpty(report) ? <Empty {...REPORTS.empty} command="everstep reports show" /> : <Whole report={report} />
        }
      </Shown>
    </Page>
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
  const [search, set, field] = useAddress()
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
          <TextInput type="date" size="xs" aria-label={REPORTS.range.from} {...field('from')} />
          <TextInput type="date" size="xs" aria-label={REPORTS.range.to} {...field('to')} />
        </>
      )}
      <NativeSelect
        size="xs"
        aria-label={REPORTS.period.label}
        data={Object.entries(REPORTS.period.names).map(([value, label]) => ({ value, label }))}
        {...field('period')}
      />
      <NativeSelect
        size="xs"
        aria-label={REPORTS.project.label}
        data={[{ value: '', label: REPORTS.project.any }, ...projects.filter(Boolean)]}
        {...field('project')}
      />
      <NativeSelect
        size="xs"
        aria-label={REPORTS.fleet.label}
        data={[{ value: '', label: REPORTS.fleet.any }, ...names]}
        {...field('fleet')}
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
  const { Failures: failures, Drills: drills } = total
  const unpriced = total.UnpricedNodeSeconds ? `, ${words.unpriced(hours(total.UnpricedNodeSeconds))}` : ''
  const costNote = words.costNote(hours(total.NodeSeconds), hours(total.RankSeconds)) + unpriced
  const drillsNote = drills.Count
    ? words.drillsNote(money(drills.CostUsd), plural(drills.RecomputedSteps, 'recomputed step'))
    : undefined
  const figure = (label: string, name: string, value: string, note?: string) => ({
    label,
    name: `report-${name}`,
    value,
    note,
  })
  return (
    <div className="totals">
      <Card label={words.title}>
        <Figures
          isLarge
          figures={[
            figure(words.ettr, 'ettr', ratio(total.EttrRatio), words.ettrNote),
            figure(words.cost, 'cost', money(total.CostUsd), costNote),
            figure(words.failureCost, 'failure-cost', money(failures.CostUsd), words.failureCostNote),
            figure(
              words.spareCost,
              'spare-cost',
              money(total.SpareCostUsd),
              words.spareCostNote(money(total.OtherIdleCostUsd)),
            ),
            figure(words.mttf, 'mttf', span(total.MttfSeconds), words.mttfNote(failures.Count)),
            figure(words.mttr, 'mttr', span(total.MttrSeconds), words.mttrNote(failures.RecoveredCount)),
            figure(words.steps, 'recomputed-steps', count(recomputedSteps(total)), words.stepsNote),
            figure(words.drills, 'drills', count(drills.Count), drillsNote),
          ]}
        />
      </Card>
    </div>
  )
}

function Trends({ report }: { report: Report }) {
  const words = REPORTS.trends
  const { Total } = report
  const costs = barsOf(report, costParts)
  const mttf = barsOf(report, ({ MttfSeconds }) => [MttfSeconds])
  const mttr = barsOf(report, ({ MttrSeconds }) => [MttrSeconds])
  const greatest = (bars: readonly Bar[]) =>
    Math.max(0, ...bars.map(({ parts }) => parts.reduce((sum, part) => sum + part, 0)))
  const known = costParts(Total).filter((part) => part !== undefined)
  const cost = known.length ? known.reduce((sum, part) => sum + part, 0) : undefined
  const time = { format: span, tick: timeTick }
  return (
    <div className="trends">
      <TrendChart
        title={words.ettr}
        bars={barsOf(report, ({ EttrRatio }) => [EttrRatio])}
        axis={[0, 0.5, 1]}
        format={ratio}
        tick={ratioTick}
        summary={ratio(Total.EttrRatio)}
        colors={['--b-train']}
      />
      <TrendChart
        title={words.cost}
        bars={costs}
        axis={axisOf(greatest(costs))}
        format={money}
        tick={moneyTick}
        summary={money(cost)}
        parts={words.costParts}
        colors={['--b-train', '--b-detect', '--b-queue']}
      />
      <TrendChart
        title={words.mttf}
        bars={mttf}
        axis={timeAxisOf(greatest(mttf))}
        summary={span(Total.MttfSeconds)}
        colors={['--b-start']}
        {...time}
      />
      <TrendChart
        title={words.mttr}
        bars={mttr}
        axis={timeAxisOf(greatest(mttr))}
        summary={span(Total.MttrSeconds)}
        colors={['--b-replace']}
        {...time}
      />
    </div>
  )
}
