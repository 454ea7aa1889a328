/** One logged value over steps or time. Downtime and figures that are not finite are gaps; failures are bands. */
import { useElementSize } from '@mantine/hooks'
import { useEffect, useRef } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'

import { clock } from '../model/format'
import type { Axis, Band } from '../model/metrics'

interface Shown {
  name: string
  axis: Axis
  x: number[]
  values: (number | null)[]
  bands: Band[]
  /** Changes with the theme: colours are read when a chart is made. */
  scheme: string
}

/** Charts with the same key share cursor and zoom. */
const SYNC = 'metrics'

export function MetricChart({ name, axis, x, values, bands, scheme }: Shown) {
  const { ref, width } = useElementSize()
  const host = useRef<HTMLDivElement>(null)
  const plot = useRef<uPlot>(null)
  const shown = useRef(bands)
  shown.current = bands
  useEffect(() => {
    const root = host.current
    if (!root || width < 50) return
    const style = getComputedStyle(document.documentElement)
    const token = (key: string) => style.getPropertyValue(key).trim()
    const line = { stroke: token('--soft'), grid: { stroke: token('--line'), width: 1 }, ticks: { stroke: token('--line'), width: 1 } }
    const told = (value: number | null) => (value === null ? '–' : axis === 'wall' ? `${clock(value)} UTC` : String(value))
    const made = new uPlot(
      {
        width,
        height: 220,
        title: name,
        scales: { x: { time: false } },
        cursor: { sync: { key: SYNC } },
        series: [{ label: axis === 'wall' ? 'time' : 'step', value: (_, value) => told(value) }, { label: name, stroke: token('--busy'), width: 1.5, spanGaps: false, points: { show: x.length < 40 } }],
        axes: [axis === 'wall' ? { ...line, values: (_, splits) => splits.map((at) => clock(at)), space: 80 } : line, { ...line, size: 62 }],
        hooks: {
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
      [x, values],
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
    const { min, max } = made.scales.x!
    const held = made.data[0]
    const isZoomed = held.length > 0 && (min !== held[0] || max !== held.at(-1))
    made.setData([x, values], !isZoomed)
    if (isZoomed) made.redraw()
  }, [x, values, bands])
  const known = values.filter((value): value is number => value !== null)
  return (
    <div ref={ref} className="chart" role="img" aria-label={`${name} over ${x.length} ${axis === 'wall' ? 'moments' : 'steps'}${known.length ? `, from ${Math.min(...known.slice(-5000))} to ${Math.max(...known.slice(-5000))}, now ${known.at(-1)}` : ''}`}>
      <div ref={host} />
    </div>
  )
}
