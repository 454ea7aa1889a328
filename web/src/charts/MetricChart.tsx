/**
 * One chart of a metric: its title, a row of fixed height with the values at the cursor, and the plot.
 *
 * Marks on the plot show failures of the job.
 */
import { memo, useEffect, useMemo, useRef, useState } from 'react'
import { Link } from 'react-router'

import { figure, marks, nearestPlace, positionWords, tablePlaces, type Range, type Unit } from '../model/chart'
import { nearestLine, type SeriesKind } from '../model/breakdown'
import type { Fault } from '../model/metrics'
import { causeTitle } from '../model/causes'
import { Table, type Column } from '../parts/Table'
import { METRICS } from '../words/metrics'
import { MARGIN, Plot, type Layout, type PlotLine, type View } from './Plot'

const WORDS = METRICS.chart
const HEIGHT = 200
const MAX_HEIGHT = 480
const MARK_PIXELS = 24
const TABLE_ROWS = 20
/** Number of characters of a node's id that the row of values shows. */
const SHORT_ID = 6

interface Props {
  title: string
  unit: Unit
  lines: readonly PlotLine[]
  faults: readonly Fault[]
  view: View
  scheme: string
  isPinned: boolean
  isMaximised: boolean
  onPin: () => void
  onMaximise: () => void
  onRange: (range: Range | undefined) => void
  /** State of the button for one line per node or rank. Absent if the metric has no values per node or rank. */
  series?: { kind: SeriesKind; isOn: boolean; onToggle: () => void }
  /** Content below the plot, such as a legend. */
  children?: React.ReactNode
}

export const MetricChart = memo(function MetricChart(props: Props) {
  const { title, unit, lines, faults, view, scheme, isPinned, isMaximised, onPin, onMaximise, onRange } = props
  const { series, children } = props
  const [layout, setLayout] = useState<Layout>()
  const [isTable, setTable] = useState(false)
  const report = useRef<Report>(() => undefined)
  const onCursor = useRef<Report>((...at) => report.current(...at)).current
  const isSplit = series?.isOn ?? false
  // With one line per node or rank, the plot draws the most deviating line last.
  const named = useMemo(() => (isSplit ? lines.filter((line) => line.colour).toReversed() : lines), [lines, isSplit])
  return (
    <section className="card chart" aria-label={title}>
      <header>
        <h3>{title}</h3>
        <div className="tools">
          {series && (
            <button
              type="button"
              className="tool words"
              aria-label={METRICS.series.of(METRICS.series.toggle[series.kind], title)}
              aria-pressed={series.isOn}
              onClick={series.onToggle}
            >
              {METRICS.series.toggle[series.kind]}
            </button>
          )}
          <Tool label={(isPinned ? WORDS.unpin : WORDS.pin)(title)} isOn={isPinned} path={PIN} onClick={onPin} />
          <Tool label={WORDS.table(title)} isOn={isTable} path={TABLE} onClick={() => setTable(!isTable)} />
          <Tool
            label={(isMaximised ? WORDS.restore : WORDS.maximise)(title)}
            isOn={isMaximised}
            path={isMaximised ? RESTORE : MAXIMISE}
            onClick={onMaximise}
          />
        </div>
      </header>
      <Readout {...{ lines, named, isSplit, unit, view, report }} />
      <div className="plotted">
        <Plot
          label={summary(title, lines, named, unit, view)}
          {...{ lines, faults, unit, view, scheme, onRange, onCursor }}
          height={isMaximised ? MAX_HEIGHT : HEIGHT}
          onLayout={setLayout}
        />
        {layout && <Marks faults={faults} layout={layout} />}
      </div>
      {children}
      {isTable && named.length > 0 && <ValueTable title={title} lines={named} unit={unit} view={view} />}
    </section>
  )
})

/** Receives the position of the cursor, see `Plot`. */
type Report = (x: number | undefined, y?: number) => void

interface ReadoutProps {
  lines: readonly PlotLine[]
  /** The lines with a colour of their own. With one line per node or rank, the most deviating one is first. */
  named: readonly PlotLine[]
  /** Whether the chart has one line per node or rank. The row then names the line nearest to the cursor. */
  isSplit: boolean
  unit: Unit
  view: View
  /** The row of values stores here its function that receives the position of the cursor. */
  report: React.RefObject<Report>
}

/** The values at the cursor, or the newest values. Only this row changes while the cursor moves. */
function Readout({ lines, named, isSplit, unit, view, report }: ReadoutProps) {
  const [{ at, value }, setCursor] = useState<{ at?: number; value?: number }>({})
  useEffect(() => {
    report.current = (x, y) => setCursor({ at: x, value: y })
  }, [report])
  const end = Math.max(...lines.map((line) => line.of.x.at(-1) ?? -Infinity))
  if (!Number.isFinite(end)) return <div className="readout" />
  const first = lines[0]!.of
  const place = nearestPlace(first.x, at ?? end)
  const nearest =
    at === undefined || value === undefined
      ? -1
      : nearestLine(
          lines.map((line) => line.of),
          at,
          value,
        )
  const shownLines = isSplit ? [lines[nearest] ?? named[0] ?? lines[0]!] : lines
  const shown = lines.length === 1 && place >= 0 ? first.x[place]! : (at ?? end)
  return (
    <div className={isSplit ? 'readout split' : 'readout'} data-cursor={at === undefined ? undefined : shown}>
      <span className="where">{positionWords(view.axis, shown, view.zone)}</span>
      {shownLines.map((line) => (
        <Value key={line.label} line={line} unit={unit} at={at ?? end} isAlone={lines.length === 1} />
      ))}
    </div>
  )
}

function Value({ line, unit, at, isAlone }: { line: PlotLine; unit: Unit; at: number; isAlone: boolean }) {
  const { of, label, colour } = line
  const place = nearestPlace(of.x, at)
  const [value, low, high] = [of.y[place], of.low[place], of.high[place]]
  const [lowOn, highOn] = [of.lowOn[place], of.highOn[place]]
  const words = (each: number, node?: string) =>
    node ? WORDS.on(figure(each, unit), `…${node.slice(-SHORT_ID)}`) : figure(each, unit)
  const hasSpread = isAlone && low != null && high != null && low !== high
  return (
    <>
      {!isAlone && <span className="key" style={{ background: `var(--c-${colour})` }} />}
      {!isAlone && <span className="who">{label}</span>}
      <strong>{figure(value, unit)}</strong>
      {hasSpread && <span className="spread">{WORDS.spread(words(low, lowOn), words(high, highOn))}</span>}
    </>
  )
}

/** The numbers of the failures above the plot, as links. Failures that are close together share a mark. */
function Marks({ faults, layout }: { faults: readonly Fault[]; layout: Layout }) {
  const found = useMemo(() => marks(faults, layout.limits, layout.width, MARK_PIXELS), [faults, layout])
  return (
    <>
      {found.map(({ left, faults: each }) => {
        const numbers = each.length > 1 ? `${each[0]!.number}–${each.at(-1)!.number}` : String(each[0]!.number)
        const causes = [...new Set(each.map((fault) => causeTitle(fault.cause)))]
        const words = METRICS.faults.mark(numbers, causes.join(', '))
        return (
          <Link
            key={numbers}
            className="mark"
            style={{ left: MARGIN.left + left }}
            to={`/incidents/${encodeURIComponent(each.at(-1)!.incidentId)}`}
            aria-label={words}
            title={words}
          >
            {numbers}
          </Link>
        )
      })}
    </>
  )
}

/** Evenly spaced points as text, for screen readers and for copying. */
function ValueTable({ title, lines, unit, view }: { title: string } & Pick<ReadoutProps, 'lines' | 'unit' | 'view'>) {
  const { label, of } = lines[0]!
  const words = WORDS.columns
  const number = (name: string, value: (place: number) => number | null | undefined): Column<number> => [
    name,
    (place) => figure(value(place), unit),
    'n',
  ]
  const others = lines
    .slice(1)
    .map((line) => number(line.label, (place) => line.of.y[nearestPlace(line.of.x, of.x[place]!)]))
  const spread = [number(words.low, (place) => of.low[place]), number(words.high, (place) => of.high[place])]
  return (
    <Table
      label={WORDS.table(title)}
      isStacked={false}
      rows={tablePlaces(of.x.length, TABLE_ROWS)}
      keyOf={(place) => place}
      columns={[
        [words.position, (place) => positionWords(view.axis, of.x[place]!, view.zone), 'moment'],
        number(others.length ? label : words.mean, (place) => of.y[place]),
        ...(others.length ? others : spread),
      ]}
    />
  )
}

/** Return one sentence that describes what a chart shows. */
function summary(
  title: string,
  lines: readonly PlotLine[],
  named: readonly PlotLine[],
  unit: Unit,
  { axis }: View,
): string {
  const known = (values: readonly (number | null)[]) => values.filter((value): value is number => value !== null)
  const lows = lines.flatMap((line) => known(line.of.low))
  const highs = lines.flatMap((line) => known(line.of.high))
  const points = Math.max(...lines.map((line) => line.of.y.filter((value) => value !== null).length))
  if (!lows.length || !highs.length) return WORDS.empty(title)
  const [least, most] = [lows.reduce((a, b) => Math.min(a, b)), highs.reduce((a, b) => Math.max(a, b))]
  const last = known((named[0] ?? lines[0]!).of.y).at(-1)
  return WORDS.summary(title, points, WORDS.units[axis], figure(least, unit), figure(most, unit), figure(last, unit))
}

const PIN = 'M5.5 2h5l-.7 4 2.2 2.5H4L6.2 6zM8 8.5V14'
const TABLE = 'M2.5 3.5h11v9h-11zM2.5 6.5h11M2.5 9.5h11M6.5 3.5v9'
const MAXIMISE = 'M9.5 2.5h4v4M6.5 13.5h-4v-4M13.5 2.5l-4.5 4.5M2.5 13.5l4.5-4.5'
const RESTORE = 'M13 7H9V3M3 9h4v4M9 7l4.5-4.5M7 9l-4.5 4.5'

function Tool({ label, isOn, path, onClick }: { label: string; isOn: boolean; path: string; onClick: () => void }) {
  return (
    <button type="button" className="tool" aria-label={label} title={label} aria-pressed={isOn} onClick={onClick}>
      <svg width="16" height="16" viewBox="0 0 16 16" aria-hidden="true">
        <path d={path} />
      </svg>
    </button>
  )
}
