/**
 * One uPlot canvas: lines over a common axis, a shade from minimum to maximum, and bands for failures.
 *
 * All plots of a page share the cursor. The parent owns the visible range, so that all plots zoom together and the
 * page's URL names the range. This component contains no text: its parent shows the values at the cursor.
 */
import { useElementSize } from '@mantine/hooks'
import { useEffect, useMemo, useRef } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'

import {
  aligned,
  binarySteps,
  compact,
  elapsedTicks,
  elapsedWords,
  figure,
  limits,
  positive,
  smoothed,
  timeLabels,
  timeTicks,
} from '../model/chart'
import type { Range, Unit, Zone } from '../model/chart'
import type { Axis, Fault, Series } from '../model/metrics'

/** One line of a plot. `colour` is the number of a chart colour of the design tokens, from 1; 0: a line in grey. */
export interface PlotLine {
  label: string
  colour: number
  of: Series
}

export interface View {
  axis: Axis
  zone: Zone
  isLog: boolean
  /** Weight of the past in the moving average; 0: no smoothing. */
  smoothing: number
  range?: Range
}

interface Props {
  label: string
  lines: readonly PlotLine[]
  faults: readonly Fault[]
  unit: Unit
  view: View
  /** Color scheme. A change creates the plot again, because a plot reads its colours only at its creation. */
  scheme: string
  height: number
  onRange: (range: Range | undefined) => void
  /**
   * Receives the position of the cursor; undefined: the cursor left all plots.
   *
   * `y` is the value at the cursor's height. undefined: the cursor is in another plot of the page.
   */
  onCursor: (x: number | undefined, y?: number) => void
  /** Receives the width of the plot in pixels, and the visible part of the axis. */
  onLayout: (layout: Layout | undefined) => void
}

export interface Layout {
  width: number
  limits: [number, number]
}

/** Room around the plot in pixels, which is the same for all plots, so that their axes line up. */
export const MARGIN = { left: 72, right: 24, top: 24 }
const SYNC = 'metrics'
const TICK_PIXELS = 84
const MIN_DRAG_PIXELS = 5
const MIN_WIDTH = 120

export function Plot({ label, lines, faults, unit, view, scheme, height, onRange, onCursor, onLayout }: Props) {
  const { ref, width } = useElementSize()
  const host = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot>(null)
  const { axis, zone, isLog, smoothing, range } = view
  const hasSpread = lines.length === 1
  const data = useMemo(() => columns(lines, isLog, smoothing), [lines, isLog, smoothing])
  const visible = useMemo(
    () =>
      limits(
        lines.map((line) => line.of),
        range,
      ),
    [lines, range],
  )
  const isDrawnLog = isLog && data.slice(1).some((column) => column.some((value) => value != null))
  const current = useRef({ visible, faults, onRange, onCursor })
  current.current = { visible, faults, onRange, onCursor }
  const isReady = width >= MIN_WIDTH
  const shape = lines.map((line) => `${line.colour} ${line.label}`).join('\n')

  useEffect(() => {
    const root = host.current
    if (!root || !isReady) return
    const style = getComputedStyle(document.documentElement)
    const token = (name: string) => style.getPropertyValue(name).trim()
    const font = `12px ${token('--font')}`
    const line = { stroke: token('--soft'), font, grid: { stroke: token('--line'), width: 1 }, ticks: { show: false } }
    const hidden = { width: 0, points: { show: false } }
    const drawn = lines.flatMap((each) => {
      const stroke = token(`--c-${each.colour}`)
      const points = { show: each.of.x.length < 3, size: 5 }
      const main = { stroke, width: each.colour ? 1.75 : 1, spanGaps: false, points }
      const raw = { stroke: `${stroke}40`, width: 1, points: { show: false } }
      return [main, ...(smoothing > 0 ? [raw] : []), ...(hasSpread ? [hidden, hidden] : [])]
    })
    const high = drawn.length
    const made = new uPlot(
      {
        width,
        height,
        padding: [MARGIN.top, MARGIN.right, 0, 0],
        legend: { show: false },
        scales: {
          x: { time: false, range: () => current.current.visible ?? [0, 1] },
          y: { distr: isDrawnLog ? 3 : 1 },
        },
        cursor: {
          y: false,
          sync: { key: SYNC, filters: { sub: isMove, pub: isMove } },
          drag: { x: true, y: false, setScale: false },
          bind: {
            dblclick: () => () => {
              current.current.onRange(undefined)
              return null
            },
          },
        },
        series: [{}, ...drawn],
        bands: hasSpread ? [{ series: [high, high - 1], fill: token('--busy-band') }] : [],
        axes: [
          { ...line, size: 30, ...(axis === 'step' ? { incrs: WHOLE } : {}), ...ticksOf(axis, zone) },
          {
            ...line,
            size: MARGIN.left,
            ...(unit.startsWith('bytes') && !isDrawnLog
              ? { incrs: (_: uPlot, __: number, ___: number, most: number) => binarySteps(most) }
              : {}),
            values: (_, ticks) => ticks.map((tick) => (tick === null ? '' : figure(tick, unit))),
          },
        ],
        hooks: {
          setCursor: [
            (chart) => {
              const { left = -1, top = -1 } = chart.cursor
              if (left < 0) return current.current.onCursor(undefined)
              const y = chart.over.matches(':hover') ? chart.posToVal(top, 'y') : undefined
              current.current.onCursor(chart.posToVal(left, 'x'), y)
            },
          ],
          setSelect: [
            (chart) => {
              const { left, width: pixels } = chart.select
              if (!pixels) return
              const [from, to] = [chart.posToVal(left, 'x'), chart.posToVal(left + pixels, 'x')]
              chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false)
              if (pixels >= MIN_DRAG_PIXELS) current.current.onRange({ from, to })
            },
          ],
          drawClear: [(chart) => drawFaults(chart, current.current.faults, token('--b-fault'), token('--bad'))],
        },
      },
      data as uPlot.AlignedData,
      root,
    )
    plot.current = made
    return () => {
      made.destroy()
      plot.current = null
    }
    // New data, ranges and failures do not create the plot again: the effect below passes them on.
  }, [isReady, axis, zone, isDrawnLog, smoothing > 0, hasSpread, scheme, unit, shape])

  useEffect(() => {
    plot.current?.setSize({ width, height })
  }, [width, height])
  useEffect(() => {
    plot.current?.setData(data as uPlot.AlignedData)
    onLayout(visible && isReady ? { width: width - MARGIN.left - MARGIN.right, limits: visible } : undefined)
  }, [data, visible, faults, width, isReady])

  return (
    <div ref={ref} className="plot" style={{ height }}>
      <div ref={host} role="img" aria-label={label} />
    </div>
  )
}

/** Possible distances of ticks on an axis of steps: whole numbers only. */
const WHOLE = Array.from({ length: 15 }, (_, power) => [1, 2, 5].map((each) => each * 10 ** power)).flat()

const isMove = (type: string): boolean => type === 'mousemove' || type === 'mouseleave'

function ticksOf(axis: Axis, zone: Zone): Partial<uPlot.Axis> {
  const most = (chart: uPlot) => Math.max(2, Math.floor(chart.bbox.width / devicePixelRatio / TICK_PIXELS))
  switch (axis) {
    case 'wall':
      return {
        splits: (chart, _, from, to) => timeTicks(from, to, most(chart), zone),
        values: (_, ticks) => timeLabels(ticks, zone),
      }
    case 'elapsed':
      return {
        splits: (chart, _, from, to) => elapsedTicks(from, to, most(chart)),
        values: (_, ticks) => ticks.map(elapsedWords),
      }
    case 'tokens':
      return { values: (_, ticks) => ticks.map(compact) }
    default:
      return { values: (_, ticks) => ticks.map((tick) => (tick >= 1e6 ? compact(tick) : tick.toLocaleString('en-US'))) }
  }
}

type Column = readonly (number | null | undefined)[]

/** Return the axis, and for each line its mean or moving average, the raw mean with an average, and the spread. */
function columns(lines: readonly PlotLine[], isLog: boolean, smoothing: number): Column[] {
  const shown = (values: readonly (number | null)[]) => (isLog ? positive(values) : values)
  const all = lines.flatMap(({ of }) => {
    const main = { x: of.x, y: shown(smoothing > 0 ? smoothed(of.y, smoothing) : of.y) }
    const raw = smoothing > 0 ? [{ x: of.x, y: shown(of.y) }] : []
    const spread = lines.length === 1 ? [of.low, of.high].map((values) => ({ x: of.x, y: shown(values) })) : []
    return [main, ...raw, ...spread]
  })
  if (lines.length === 1) return [lines[0]!.of.x, ...all.map((line) => line.y)]
  const { x, columns: found } = aligned(all)
  return [x, ...found]
}

function drawFaults(chart: uPlot, faults: readonly Fault[], band: string, edge: string): void {
  const { ctx, bbox } = chart
  for (const fault of faults) {
    const [from, to] = [chart.valToPos(fault.from, 'x', true), chart.valToPos(fault.to, 'x', true)]
    if (to < bbox.left || from > bbox.left + bbox.width) continue
    const left = Math.max(bbox.left, from)
    ctx.fillStyle = band
    ctx.fillRect(left, bbox.top, Math.max(2, Math.min(to, bbox.left + bbox.width) - left), bbox.height)
    ctx.fillStyle = edge
    if (from >= bbox.left) ctx.fillRect(from - 0.5, bbox.top, Math.max(1, devicePixelRatio), bbox.height)
  }
}
