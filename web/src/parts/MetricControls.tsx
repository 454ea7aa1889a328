/** The row of controls above a job's charts. The page's URL contains their values except the time zone. */
import { Button } from '@mantine/core'

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
  /** Changes parameters of the page's URL. An empty text removes a parameter. */
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
      <div className="segments" role="group" aria-label={METRICS.axis.label}>
        {axes.map((each) => (
          <button
            key={each}
            type="button"
            aria-pressed={each === axis}
            onClick={() => set({ axis: each === 'step' ? '' : each, last: '', from: '', to: '' })}
          >
            {METRICS.axis[each]}
          </button>
        ))}
      </div>
      <Choice
        label={METRICS.range.label}
        value={preset}
        options={options}
        onChange={(value) => onRange(value ? { last: Number(value) } : undefined)}
      />
      <Button size="xs" variant="default" disabled={!range} onClick={() => onRange(undefined)}>
        {METRICS.range.reset}
      </Button>
      <Choice
        label={METRICS.smoothing.label}
        value={String(smoothing)}
        options={weights}
        onChange={(value) => set({ smooth: value === '0' ? '' : value })}
      />
      <label className="check">
        <input
          type="checkbox"
          checked={isLog}
          onChange={(event) => set({ log: event.currentTarget.checked ? '1' : '' })}
        />
        {METRICS.log}
      </label>
      {axis === 'wall' && (
        <Choice
          label={METRICS.zone.label}
          value={zone}
          options={[
            { value: 'utc', label: METRICS.zone.utc },
            { value: 'local', label: METRICS.zone.local },
          ]}
          onChange={(value) => onZone(value === 'local' ? 'local' : 'utc')}
        />
      )}
      <div className="row push">
        <input
          data-filter
          aria-label={METRICS.filter.label}
          placeholder={METRICS.filter.placeholder}
          value={filter}
          onChange={(event) => set({ q: event.currentTarget.value })}
        />
        {jobs.length > 0 && (
          <Choice
            label={METRICS.compare.label}
            value=""
            options={[
              { value: '', label: METRICS.compare.placeholder },
              ...jobs.map((name) => ({ value: name, label: name })),
            ]}
            onChange={(value) => value && onCompare(value)}
          />
        )}
        <Button size="xs" variant="default" onClick={onCsv}>
          {METRICS.csv}
        </Button>
      </div>
    </div>
  )
}

interface ChoiceProps {
  label: string
  value: string
  options: readonly { value: string; label: string }[]
  onChange: (value: string) => void
}

/** A choice in the browser's own select element, which needs no code from Mantine. */
function Choice({ label, value, options, onChange }: ChoiceProps) {
  return (
    <select aria-label={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
      {options.map((each) => (
        <option key={each.value} value={each.value}>
          {each.label}
        </option>
      ))}
    </select>
  )
}
