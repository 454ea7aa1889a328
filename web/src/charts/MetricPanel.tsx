/** The chart of one metric on a job's page: one line per run, or one line per node or rank. */
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'

import { seriesQuery } from '../api/metrics'
import { MAX_SERIES, parts, standingOut } from '../model/breakdown'
import type { Logged } from '../model/changes'
import { figure, type Range, type Unit } from '../model/chart'
import { series, type Fault, type Window } from '../model/metrics'
import { extremes, titleOf, unitOf } from '../model/ownMetrics'
import { NodeLink } from '../parts/Basics'
import { METRICS } from '../words/metrics'
import { MetricChart } from './MetricChart'
import type { PlotLine, View } from './Plot'

/** One run whose metrics are drawn. */
export interface Run {
  name: string
  colour: number
  metrics: Logged
  startedAt: number
  tokens: (step: number) => number | null
  gaps: readonly number[]
}

interface Props {
  name: string
  runs: readonly Run[]
  faults: readonly Fault[]
  view: View
  scheme: string
  fleet: string
  nodeCount: number
  /** Name or run id of the job in requests. */
  address: string
  /** The visible part of a zoomed axis. Undefined if the whole axis is visible. */
  window: Window | undefined
  /** Whether the page's URL selects one line per node or rank. Without effect if the chart compares several runs. */
  isSplit: boolean
  isPinned: boolean
  isMaximised: boolean
  onSplit: () => void
  onPin: () => void
  onMaximise: () => void
  onRange: (range: Range | undefined) => void
}

export function Panel({ name, runs, fleet, nodeCount, address, window, isSplit, onSplit, ...chart }: Props) {
  const { axis } = chart.view
  const kind = runs.length === 1 ? runs[0]!.metrics.get(name)?.SeriesKind : undefined
  const isOn = isSplit && kind !== undefined
  const query = useQuery({
    ...seriesQuery(address, name, kind ?? 'Node', window),
    enabled: isOn,
    placeholderData: keepPreviousData,
  })
  const split = isOn ? query.data?.metrics.get(name) : undefined
  const separate = useMemo(() => split && separateLines(parts(split), runs[0]!, axis), [split, runs, axis])
  const ofRuns = useMemo(
    () =>
      runs.flatMap(({ name: label, colour, metrics, ...scale }) => {
        const metric = metrics.get(name)
        return metric ? [{ label, colour, of: series(metric, { axis, ...scale }) }] : []
      }),
    [runs, name, axis],
  )
  const title = titleOf(name)
  return (
    <MetricChart
      {...{ title, ...chart }}
      unit={unitOf(name)}
      lines={separate?.lines ?? ofRuns}
      series={kind && { kind, isOn, onToggle: onSplit }}
    >
      {isOn && query.error && <p className="dim extremes">{METRICS.series.failed(query.error.message)}</p>}
      {separate ? (
        <Legend title={title} unit={unitOf(name)} fleet={fleet} {...separate} />
      ) : (
        ofRuns.length === 1 && <Extremes {...{ fleet, nodeCount }} line={ofRuns[0]!} />
      )}
    </MetricChart>
  )
}

interface SeparateLine extends PlotLine {
  nodeId?: string
}

/** Return all lines in the order of drawing: first the grey lines, then the coloured ones, the most deviating last. */
function separateLines(found: ReturnType<typeof parts>, { startedAt, gaps, tokens }: Run, axis: View['axis']) {
  const lines = found.map(({ nodeId, rank, metric }): SeparateLine => {
    const label = nodeId ?? METRICS.series.rank(rank ?? 0)
    return { label, nodeId, colour: 0, of: series(metric, { axis, startedAt, gaps, tokens }) }
  })
  const { places, colours } = standingOut(lines.map((line) => line.of.y))
  const named = places.map((place) => ({ ...lines[place]!, colour: colours[place]! }))
  const others = lines.filter((_, place) => !colours[place])
  return { lines: [...others, ...named.toReversed()], named, otherCount: others.length }
}

interface LegendProps {
  title: string
  unit: Unit
  fleet: string
  named: readonly SeparateLine[]
  otherCount: number
}

/** The nodes or ranks whose lines have a colour, with their newest values. */
function Legend({ title, unit, fleet, named, otherCount }: LegendProps) {
  return (
    <ul className="plain line-legend" aria-label={METRICS.series.legend(title)}>
      {named.map(({ label, nodeId, colour, of }) => (
        <li key={label}>
          <span className="key" style={{ background: `var(--c-${colour})` }} />
          {nodeId ? <NodeLink id={nodeId} fleet={fleet} /> : label}
          <span className="dim">
            {figure(
              of.y.findLast((value) => value !== null),
              unit,
            )}
          </span>
        </li>
      ))}
      {otherCount > 0 && <li className="dim">{METRICS.series.others(otherCount)}</li>}
    </ul>
  )
}

/** The nodes with the lowest and the highest value, and the reason why the chart has no line per node. */
function Extremes({ line, fleet, nodeCount }: ExtremesProps) {
  const found = extremes(line.of)
  if (!found) return null
  const words = METRICS.extremes
  return (
    <p className="dim extremes">
      <span>
        {words.least} <NodeLink id={found.least} fleet={fleet} />
      </span>
      <span>
        {words.most} <NodeLink id={found.most} fleet={fleet} />
      </span>
      {nodeCount > MAX_SERIES && <span>{METRICS.series.tooMany(nodeCount, MAX_SERIES)}</span>}
    </p>
  )
}

interface ExtremesProps {
  line: PlotLine
  fleet: string
  nodeCount: number
}
