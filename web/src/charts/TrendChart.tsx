/** A bar per time bucket of a report. The line above the bars shows the figures of the bar under the pointer. */
import { useElementSize } from '@mantine/hooks'
import { useState } from 'react'

import { bucketWords, isHourly, type Bar } from '../model/reports'
import { Card } from '../parts/Card'
import { REPORTS } from '../words/reports'

interface Props {
  title: string
  bars: Bar[]
  /** The three labelled values of the vertical axis: 0, the middle and the top. */
  axis: [number, number, number]
  format: (value: number) => string
  /** Writes a value of the axis in at most seven characters. */
  tick: (value: number) => string
  /** The line above the bars while no bar is under the pointer. */
  summary: string
  /** Names of the stacked parts. Without names, a bar has one part. */
  parts?: readonly string[]
  /** Colours of the parts: custom properties of tokens.css. */
  colors: readonly string[]
}

const HEIGHT = 168
const LEFT = 56
const BOTTOM = 22
const TOP = 8
const LABEL_WIDTH = 84

export function TrendChart({ title, bars, axis, format, tick, summary, parts, colors }: Props) {
  const { ref, width } = useElementSize()
  const [pointed, setPointed] = useState<number>()
  const top = axis[2]
  const slot = Math.max(0, width - LEFT) / Math.max(1, bars.length)
  const y = (value: number) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(1, value / top))
  const stride = Math.max(1, Math.ceil(LABEL_WIDTH / Math.max(1, slot)))
  const bar = pointed === undefined ? undefined : bars[pointed]
  const hasHours = isHourly(bars)
  const range = bars.length
    ? `${bucketWords(bars[0]!.start, hasHours)} – ${bucketWords(bars.at(-1)!.start, hasHours)}`
    : ''
  return (
    <Card>
      <div className="trend" ref={ref}>
        <h2>{title}</h2>
        <p className="readout">
          {bar ? `${bucketWords(bar.start, hasHours)}: ${readout(bar, format, parts)}` : summary}
        </p>
        <svg
          width={width}
          height={HEIGHT}
          role="img"
          aria-label={REPORTS.trends.aria(title, bars.length, range)}
          onPointerLeave={() => setPointed(undefined)}
          onPointerMove={(event) => {
            const at = event.clientX - event.currentTarget.getBoundingClientRect().left - LEFT
            setPointed(at < 0 ? undefined : Math.min(bars.length - 1, Math.floor(at / slot)))
          }}
        >
          {axis.map((value) => (
            <g key={value}>
              <line x1={LEFT} x2={width} y1={y(value)} y2={y(value)} className="axis" />
              <text x={LEFT - 8} y={y(value) + 4} textAnchor="end">
                {tick(value)}
              </text>
            </g>
          ))}
          {width > LEFT &&
            bars.map((each, index) => (
              <g key={each.start} className={index === pointed ? 'pointed' : undefined}>
                {stacked(each.parts).map(([from, to], part) => (
                  <rect
                    key={part}
                    x={LEFT + index * slot + Math.min(2, slot / 6)}
                    width={Math.max(1, slot - 2 * Math.min(2, slot / 6))}
                    y={y(to)}
                    height={Math.max(to > from ? 1 : 0, y(from) - y(to))}
                    fill={`var(${colors[part]})`}
                  />
                ))}
                {index % stride === 0 && LEFT + (index + 0.5) * slot + LABEL_WIDTH / 2 <= width && (
                  <text x={LEFT + (index + 0.5) * slot} y={HEIGHT - 6} textAnchor="middle">
                    {bucketWords(each.start, hasHours)}
                  </text>
                )}
              </g>
            ))}
        </svg>
        {parts && (
          <div className="keys">
            {parts.map((part, index) => (
              <span key={part} className="row">
                <span className="key" style={{ background: `var(${colors[index]})` }} />
                {part}
              </span>
            ))}
          </div>
        )}
      </div>
    </Card>
  )
}

function readout(bar: Bar, format: (value: number) => string, parts?: readonly string[]): string {
  if (!bar.parts.length) return REPORTS.trends.none
  return parts ? bar.parts.map((part, index) => `${parts[index]} ${format(part)}`).join(', ') : format(bar.parts[0]!)
}

/** Lower and upper end of each part of a stack. */
function stacked(parts: readonly number[]): [number, number][] {
  let from = 0
  return parts.map((part) => [from, (from += part)])
}
