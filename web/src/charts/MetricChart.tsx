/** One logged value over steps. Downtime and figures that are not finite are gaps; recoveries are bands. */
import { useElementSize } from '@mantine/hooks'
import { useEffect, useRef } from 'react'
import uPlot from 'uplot'
import 'uplot/dist/uPlot.min.css'

export interface Band {
  from: number
  to: number
}

export function MetricChart({ name, steps, values, bands }: { name: string; steps: number[]; values: (number | null)[]; bands: Band[] }) {
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
    const axis = { stroke: token('--soft'), grid: { stroke: token('--line'), width: 1 }, ticks: { stroke: token('--line'), width: 1 } }
    const made = new uPlot(
      {
        width,
        height: 220,
        title: name,
        scales: { x: { time: false } },
        cursor: { sync: { key: 'metrics' } },
        series: [{ label: 'step' }, { label: name, stroke: token('--busy'), width: 1.5, spanGaps: false, points: { show: steps.length < 40 } }],
        axes: [axis, { ...axis, size: 62 }],
        hooks: {
          drawClear: [
            (chart) => {
              chart.ctx.fillStyle = token('--warn-bg')
              for (const band of shown.current) {
                const from = chart.valToPos(band.from, 'x', true)
                chart.ctx.fillRect(from, chart.bbox.top, Math.max(2, chart.valToPos(band.to, 'x', true) - from), chart.bbox.height)
              }
            },
          ],
        },
      },
      [steps, values],
      root,
    )
    plot.current = made
    return () => {
      made.destroy()
      plot.current = null
    }
    // Data changes are given to the plot below: making it anew would lose the zoom.
  }, [width, name])
  useEffect(() => plot.current?.setData([steps, values]), [steps, values])
  return (
    <div ref={ref} className="chart" role="img" aria-label={`${name} over ${steps.length} steps`}>
      <div ref={host} />
    </div>
  )
}
