/** The row of controls above a job's charts. The address keeps all of them except the time zone. */
import { Button, Checkbox, NativeSelect, SegmentedControl, TextInput } from '@mantine/core'

import { PRESETS, type Range, type Zone } from '../model/chart'
import type { Axis } from '../model/metrics'
import { METRICS } from '../words/metrics'

const WEIGHTS = [0.6, 0.9, 0.97, 0.99]

interface Controls {
  axis: Axis
  /** Axes that these metrics can be drawn over. */
  axes: readonly Axis[]
  range: Range | undefined
  smoothing: number
  isLog: boolean
  zone: Zone
  filter: string
  /** Names of jobs that can be added to the comparison. */
  jobs: readonly string[]
  /** Changes parameters of the address; an empty text removes a parameter. */
  set: (changes: Record<string, string>) => void
  onRange: (range: Range | undefined) => void
  onZone: (zone: Zone) => void
  onCompare: (name: string) => void
  onCsv: () => void
}

export function MetricControls(props: Controls) {
  const { axis, axes, range, smoothing, isLog, zone, filter, jobs, set, onRange, onZone, onCompare, onCsv } = props
  const preset = range && 'last' in range ? String(range.last) : range ? 'zoomed' : ''
  const span = axis === 'step' ? METRICS.range.steps : METRICS.range.time
  const options = [
    { value: '', label: METRICS.range.all },
    ...PRESETS[axis].map((each) => ({ value: String(each), label: span(each) })),
    ...(preset === 'zoomed' ? [{ value: 'zoomed', label: METRICS.range.zoomed }] : []),
  ]
  const weights = [0, ...WEIGHTS].map((weight) => ({
    value: String(weight),
    label: weight ? METRICS.smoothing.weight(weight) : METRICS.smoothing.none,
  }))
  return (
    <div className="row controls">
      <SegmentedControl
        size="xs"
        aria-label={METRICS.axis.label}
        value={axis}
        onChange={(value) => set({ axis: value === 'step' ? '' : value, last: '', from: '', to: '' })}
        data={axes.map((each) => ({ value: each, label: METRICS.axis[each] }))}
      />
      <NativeSelect
        size="xs"
        aria-label={METRICS.range.label}
        value={preset}
        onChange={(event) =>
          onRange(event.currentTarget.value ? { last: Number(event.currentTarget.value) } : undefined)
        }
        data={options}
      />
      <Button size="xs" variant="default" disabled={!range} onClick={() => onRange(undefined)}>
        {METRICS.range.reset}
      </Button>
      <NativeSelect
        size="xs"
        aria-label={METRICS.smoothing.label}
        value={String(smoothing)}
        onChange={(event) => set({ smooth: event.currentTarget.value === '0' ? '' : event.currentTarget.value })}
        data={weights}
      />
      <Checkbox
        size="xs"
        label={METRICS.log}
        checked={isLog}
        onChange={(event) => set({ log: event.currentTarget.checked ? '1' : '' })}
      />
      {axis === 'wall' && (
        <NativeSelect
          size="xs"
          aria-label={METRICS.zone.label}
          value={zone}
          onChange={(event) => onZone(event.currentTarget.value === 'local' ? 'local' : 'utc')}
          data={[
            { value: 'utc', label: METRICS.zone.utc },
            { value: 'local', label: METRICS.zone.local },
          ]}
        />
      )}
      <div className="row push">
        <TextInput
          size="xs"
          data-filter
          aria-label={METRICS.filter.label}
          placeholder={METRICS.filter.placeholder}
          value={filter}
          onChange={(event) => set({ q: event.currentTarget.value })}
        />
        {jobs.length > 0 && (
          <NativeSelect
            size="xs"
            className="compare"
            aria-label={METRICS.compare.label}
            value=""
            onChange={(event) => event.currentTarget.value && onCompare(event.currentTarget.value)}
            data={[{ value: '', label: METRICS.compare.placeholder }, ...jobs]}
          />
        )}
        <Button size="xs" variant="default" onClick={onCsv}>
          {METRICS.csv}
        </Button>
      </div>
    </div>
  )
}
