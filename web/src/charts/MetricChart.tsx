/** One value over steps or time: the mean of each point, and the least and the most in it as a shade, with their nodes where several measured it. Downtime and figures that are not finite are gaps; failures are bands. */
import { useElementSize } from '@mantine/hooks'
import { useEffect, useRef } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'

import { clock } from '../model/format'
import { isSpan, windowOf, type Axis, type Band, type Series, type Window } from '../model/metrics'

interface Shown {
  name: string
  axis: Axis
  of: Series
  bands: Band[]
  /** Changes with the theme: colours are read when a chart is made. */
  scheme: string
  /** Told what is looked at; undefined: all of it. */
  onWindow: (window?: Window) => void
}

/** A figure of an axis, as short as there is room for. */
const short = (value: number): string => (Math.abs(value) < 10_000 ? String(Number(value.toPrecision(6))) : value.toLocaleString('en-US', { notation: 'compact', maximumFractionDigits: 2 }))

/** Charts with the same key share cursor and zoom. */
const SYNC = 'metrics'

export function MetricChart({ name, axis, of, bands, scheme, onWindow }: Shown) {
  const { x, values, least, most } = of
  const { ref, width } = useElementSize()
  const host = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot>(null)
  const shown = useRef(bands)
  shown.current = bands
  const nodes = useRef(of)
  nodes.current = of
  useEffect(() => {
    const root = host.current
    if (!root || width < 50) return
    const style = getComputedStyle(document.documentElement)
    const token = (key: string) => style.getPropertyValue(key).trim()
    const line = { stroke: token('--soft'), grid: { stroke: token('--line'), width: 1 }, ticks: { stroke: token('--line'), width: 1 } }
    const hidden = (on: 'leastOn' | 'mostOn') => ({
      width: 0,
      points: { show: false },
      value: (_: uPlot, value: number | null, __: number, index: number | null) => (value === null ? '–' : [value, index === null ? undefined : nodes.current[on][index]].filter((each) => each !== undefined).join(' on ')),
    })
    const told = (value: number | null) => (value === null ? '–' : axis === 'wall' ? `${clock(value)} UTC` : String(value))
    const made = new uPlot(
      {
        width,
        height: 220,
        title: name,
        scales: { x: { time: false } },
        cursor: { sync: { key: SYNC } },
        series: [{ label: axis === 'wall' ? 'time' : 'step', value: (_, value) => told(value) }, { label: name, stroke: token('--busy'), width: 1.5, spanGaps: false, points: { show: x.length < 40 } }, { label: 'least', ...hidden('leastOn') }, { label: 'most', ...hidden('mostOn') }],
        bands: [{ series: [3, 2], fill: token('--busy-band') }],
        axes: [axis === 'wall' ? { ...line, values: (_, splits) => splits.map((at) => clock(at)), space: 80 } : line, { ...line, size: 62, values: (_, splits) => splits.map(short) }],
        hooks: {
          setScale: [
            (chart, key) => {
              const held = chart.data[0] as number[]
              if (key === 'x' && isSpan(held)) onWindow(windowOf(axis, chart.scales.x!, held))
            },
          ],
          drawClear: [
            (chart) => {
              chart.ctx.fillStyle = token('--b-fault')
              for (const band of shown.current) {
                const from = chart.valToPos(band.from, 'x', true)
                chart.ctx.fillRect(from, chart.bbox.top, Math.max(2, chart.valToPos(band.to, 'x', true) - from), chart.bbox.height)
              }
            },
          ],
        },
      },
      [x, values, least, most],
      root,
    )
    plot.current = made
    return () => {
      made.destroy()
      plot.current = null
    }
    // Data changes are given to the plot below: making it anew would lose the zoom.
  }, [width, name, axis, scheme])
  useEffect(() => {
    const made = plot.current
    if (!made) return
    const isZoomed = windowOf(axis, made.scales.x!, made.data[0] as number[]) !== undefined
    made.setData([x, values, least, most], !isZoomed)
    if (isZoomed) made.redraw()
  }, [of, bands])
  const known = values.filter((value): value is number => value !== null)
  const [lowest, highest] = [least, most].map((column) => column.filter((value): value is number => value !== null).slice(-5000))
  return (
    <div ref={ref} className="chart" role="img" aria-label={`${name} over ${x.length} ${axis === 'wall' ? 'moments' : 'steps'}${known.length ? `, from ${Math.min(...lowest!)} to ${Math.max(...highest!)}, now ${known.at(-1)}` : ''}`}>
      <div ref={host} />
    </div>
  )
}
