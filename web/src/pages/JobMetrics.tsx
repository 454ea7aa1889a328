/** The Metrics tab of a job: a chart per metric over steps, time or tokens, which can also show other jobs' metrics. */
import { useComputedColorScheme } from '@mantine/core'
import { useQueries, useQuery } from '@tanstack/react-query'
import { useCallback, useEffect, useMemo } from 'react'
import { Link } from 'react-router'

import { useJobAddress } from '../api/addresses'
import { metricsQuery } from '../api/metrics'
import { incidentsQuery, jobQuery, jobsQuery } from '../api/queries'
import { Panel, type Run } from '../charts/MetricPanel'
import type { View } from '../charts/Plot'
import type { TrainingJob } from '../contract'
import type { Logged } from '../model/changes'
import { positionWords, rangeOf, rangeParameters, type Range, type Zone } from '../model/chart'
import { csv, detailed, faultsOn, isCoarse, standstills, startOf, tokensAt, tokensMetric } from '../model/metrics'
import type { Axis, Fault, Window } from '../model/metrics'
import { groups, isOwn, titleOf } from '../model/ownMetrics'
import { causeTitle } from '../model/causes'
import { toggled, useAddress } from '../parts/address'
import { Empty, Shown, useNow } from '../parts/Basics'
import { download } from '../parts/download'
import { useKept } from '../parts/kept'
import { MetricControls } from '../parts/MetricControls'
import { DifferenceTable, RunChips } from '../parts/RunComparison'
import { METRICS } from '../words/metrics'
import '../styles/charts.css'

const MAX_COMPARED = 7
const MAX_FAULTS = 12
const COMPARED_REFRESH_MS = 15_000
const NONE: Logged = new Map()

const runOf = (name: string, colour: number, metrics: Logged, gaps: readonly number[] = []): Run => ({
  name,
  colour,
  metrics,
  startedAt: startOf(metrics),
  tokens: tokensAt(metrics.get(tokensMetric([...metrics.keys()]) ?? '')),
  gaps,
})

export default function MetricsTab({ job }: { job: TrainingJob }) {
  const [search, set] = useAddress()
  const address = useJobAddress(job)
  const query = useQuery(metricsQuery(address))
  const scheme = useComputedColorScheme('light')
  const [zoneText, keepZone] = useKept('everstep-zone')
  const [pinnedText, keepPinned] = useKept('everstep-pinned-metrics')
  const metrics = query.data?.metrics ?? NONE
  const names = useMemo(() => [...metrics.keys()], [metrics])
  const hasTokens = tokensMetric(names) !== undefined
  const axes: readonly Axis[] = ['step', 'wall', 'elapsed', ...(hasTokens ? (['tokens'] as const) : [])]
  const axis = axes.find((each) => each === search.get('axis')) ?? 'step'
  const range = useMemo(() => rangeOf(search), [search])
  const smoothing = Math.min(0.999, Math.max(0, Number(search.get('smooth')) || 0))
  const isLog = search.get('log') === '1'
  const zone: Zone = zoneText === 'local' ? 'local' : 'utc'
  const view = useMemo<View>(() => ({ axis, zone, isLog, smoothing, range }), [axis, zone, isLog, smoothing, range])
  const onRange = useCallback((to: Range | undefined) => set(rangeParameters(to, axis)), [axis, set])

  const comparedIn = (place: URLSearchParams) => {
    const asked = (place.get('with') ?? '').split(',').filter((name) => name && name !== address)
    return asked.slice(0, MAX_COMPARED)
  }
  const compared = comparedIn(search)
  const toggleCompared = (name: string) => set((newest) => ({ with: toggled(comparedIn(newest), name).join(',') }))
  const refresh = { refetchInterval: COMPARED_REFRESH_MS }
  const others = useQueries({ queries: compared.map((name) => ({ ...metricsQuery(name), ...refresh })) })
  const otherJobs = useQueries({ queries: compared.map((name) => ({ ...jobQuery(name), ...refresh })) })
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data ?? []
  const choices = jobs
    .map((each) => each.TrainingJobName)
    .filter((name) => name !== job.TrainingJobName && !compared.includes(name))

  const startedAt = useMemo(() => startOf(metrics), [metrics])
  const window = windowOf(axis, range, startedAt)
  const isFine = window === undefined || !isCoarse(metrics, window)
  const detail = useQuery({ ...metricsQuery(address, window), enabled: !isFine }).data?.metrics
  const { faults, gaps } = useFailures(job, address, axis, startedAt)
  const otherData = others.map((each) => each.data?.metrics)
  // Pad the list, because React requires dependencies of the same number in every render.
  const padded = Array.from({ length: MAX_COMPARED }, (_, index) => otherData[index])
  const runs = useMemo(() => {
    const own = !isFine && detail ? detailed(metrics, detail) : metrics
    const more = compared.map((name, index) => runOf(name, index + 2, otherData[index] ?? NONE))
    return [runOf(job.TrainingJobName, 1, own, gaps), ...more]
  }, [job.TrainingJobName, metrics, isFine, detail, gaps, compared.join(), ...padded])

  const filter = search.get('q') ?? ''
  const pinned = pinnedText.split('\n').filter(Boolean)
  const all = useMemo(() => [...new Set(runs.flatMap((run) => [...run.metrics.keys()]))], [runs])
  const wanted = all.filter((name) => `${name} ${titleOf(name)}`.toLowerCase().includes(filter.toLowerCase()))
  const alone = wanted.find((name) => name === search.get('chart'))
  const first = wanted.filter((name) => pinned.includes(name))
  const sections = alone
    ? [{ title: '', names: [alone] }]
    : [
        ...(first.length ? [{ title: METRICS.pinned, names: first }] : []),
        ...groups(wanted.filter((name) => !pinned.includes(name))),
      ]
  useEscape(alone !== undefined, () => set({ chart: '' }))
  const splitIn = (place: URLSearchParams) => (place.get('split') ?? '').split('\n').filter(Boolean)
  const split = splitIn(search)
  const toggleSplit = (name: string) => set((newest) => ({ split: toggled(splitIn(newest), name).join('\n') }))
  const pin = (name: string) => keepPinned(toggled(pinned, name).join('\n'))
  const described = [job, ...otherJobs.flatMap((each) => each.data ?? [])]

  return (
    <Shown query={query}>
      {() =>
        all.length ? (
          <div className="stack">
            <MetricControls
              {...{ axis, axes, range, smoothing, isLog, zone, filter, set, onRange }}
              jobs={compared.length < MAX_COMPARED ? choices : []}
              onZone={keepZone}
              onCompare={toggleCompared}
              onCsv={() => download(`${job.TrainingJobName}-metrics.csv`, [csv(metrics)], 'text/csv')}
            />
            {compared.length > 0 && (
              <RunChips
                runs={runs.map((run, index) => ({ ...run, hasFailed: index > 0 && others[index - 1]?.isError }))}
                onRemove={toggleCompared}
              />
            )}
            {sections.map((group) => (
              <section key={group.title} aria-label={group.title || titleOf(alone ?? '')}>
                {group.title && <h2>{group.title}</h2>}
                <div className={alone ? 'charts alone' : 'charts'}>
                  {group.names.map((name) => (
                    <Panel
                      key={name}
                      {...{ name, runs, faults, view, scheme, onRange, address, window }}
                      fleet={job.FleetName}
                      nodeCount={job.NodeCount}
                      isSplit={split.includes(name)}
                      onSplit={() => toggleSplit(name)}
                      isPinned={pinned.includes(name)}
                      isMaximised={name === alone}
                      onPin={() => pin(name)}
                      onMaximise={() => set({ chart: name === alone ? '' : name })}
                    />
                  ))}
                </div>
              </section>
            ))}
            {!wanted.length && <p className="dim">{METRICS.noMatch}</p>}
            {compared.length > 0 && <DifferenceTable jobs={described} />}
            <FaultList faults={faults} axis={axis} zone={zone} />
            <p className="dim">
              {METRICS.help} {wanted.some(isOwn) && METRICS.ownHelp}
            </p>
          </div>
        ) : (
          <Empty {...METRICS.empty} />
        )
      }
    </Shown>
  )
}

/** Return the part of a zoomed axis for which the page requests metrics in a finer resolution. */
function windowOf(axis: Axis, range: Range | undefined, startedAt: number): Window | undefined {
  if (!range || !('from' in range) || axis === 'tokens') return undefined
  const shift = axis === 'elapsed' ? startedAt : 0
  return { axis: axis === 'step' ? 'step' : 'wall', from: range.from + shift, to: range.to + shift }
}

interface Failures {
  faults: Fault[]
  /** Unix seconds at which training stopped. */
  gaps: number[]
}

/** Return the failures on the axis, and the times at which training stopped. */
function useFailures(job: TrainingJob, address: string, axis: Axis, startedAt: number): Failures {
  const incidents = useQuery(incidentsQuery(address)).data
  const mine = useMemo(() => (incidents ?? []).filter((each) => each.RunId === job.RunId), [incidents, job.RunId])
  const now = useNow()
  const until = mine.some((each) => each.ClosedAt === undefined) ? now : 0
  const faults = useMemo(() => faultsOn(mine, axis, until, startedAt), [mine, axis, until, startedAt])
  const transitions = job.SecondaryStatusTransitions
  const gaps = useMemo(() => [...mine.map((each) => each.FailedAt), ...standstills(transitions)], [mine, transitions])
  return { faults, gaps }
}

/** The numbered failures, the newest first, as links to their incidents. */
function FaultList({ faults, axis, zone }: { faults: readonly Fault[]; axis: Axis; zone: Zone }) {
  if (!faults.length) return null
  const shown = faults.slice(-MAX_FAULTS).toReversed()
  return (
    <section className="card">
      <h2>{METRICS.faults.title}</h2>
      <ul className="plain faults" aria-label={METRICS.faults.title}>
        {shown.map((fault) => (
          <li key={fault.incidentId}>
            <span className="number">{fault.number}</span>
            <Link to={`/incidents/${encodeURIComponent(fault.incidentId)}`}>{causeTitle(fault.cause)}</Link>
            <span className="dim">{positionWords(axis, axis === 'step' ? fault.to : fault.from, zone)}</span>
          </li>
        ))}
      </ul>
      {shown.length < faults.length && <p className="dim">{METRICS.faults.more(faults.length - shown.length)}</p>}
    </section>
  )
}

function useEscape(isActive: boolean, leave: () => void): void {
  useEffect(() => {
    if (!isActive) return
    const listen = (event: KeyboardEvent) => event.key === 'Escape' && !event.defaultPrevented && leave()
    document.addEventListener('keydown', listen)
    return () => document.removeEventListener('keydown', listen)
  })
}
