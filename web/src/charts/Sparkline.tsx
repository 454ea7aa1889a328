/** The shape of a series in the height of a line of text, without axes. Gaps stay gaps. */
interface Props {
  /** Values in order. null: no value at that point. */
  values: readonly (number | null)[]
  /** What the line shows, for screen readers: "loss, from 4.2 to 1.9". */
  label: string
}

const [width, height] = [88, 22]

export function Sparkline({ values, label }: Props) {
  return (
    <svg
      className="spark"
      width={width}
      height={height}
      viewBox={`0 0 ${width} ${height}`}
      role="img"
      aria-label={label}
    >
      <path d={outline(values, width, height)} />
    </svg>
  )
}

/** Return the SVG path of a series that fills `width` × `height` pixels with a margin of one pixel. */
export function outline(values: readonly (number | null)[], width: number, height: number): string {
  const known = values.filter((value): value is number => value !== null && Number.isFinite(value))
  if (known.length < 2) return ''
  const least = Math.min(...known)
  const span = Math.max(...known) - least || 1
  let isPenDown = false
  return values
    .map((value, index) => {
      if (value === null || !Number.isFinite(value)) {
        isPenDown = false
        return ''
      }
      const x = 1 + (index / (values.length - 1)) * (width - 2)
      const y = 1 + (1 - (value - least) / span) * (height - 2)
      const command = isPenDown ? 'L' : 'M'
      isPenDown = true
      return `${command}${x.toFixed(1)} ${y.toFixed(1)}`
    })
    .join('')
}
