/** The timeline of a job: what the job did, and one lane for each node. */
import { Button } from '@mantine/core'
import { useElementSize } from '@mantine/hooks'
import { useState, type ReactNode } from 'react'
import { Link } from 'react-router'

import type { Incident, TimeSpan, TrainingJob, TrainingJobNode } from '../contract'
import { count, duration, local, moment, plural, utc } from '../model/format'
import { MOST_NODES, ticks, timeline, type Fault, type Lane, type Span } from '../model/timeline'
import { wordsOf } from '../model/time'
import { TIMELINE } from '../words/jobTabs'

const color = (kind: string) => `var(--b-${kind}, var(--b-rest))`

const LANE = 28
const BAR = 16
const TOP = 6
/** Distance of ticks on the time axis, and width of a letter inside a bar, both in pixels. */
const TICK = 96
const LETTER = 7
const AXIS = 20
const KEYS = ['train', 'start', 'detect', 'replace', 'restore', 'rework', 'unaccounted'] as const

interface Props {
  job: Partial<TrainingJob>
  incidents: Incident[]
  spans: TimeSpan[]
  nodes: TrainingJobNode[]
  now: number
  /** Unix seconds at which the visible range begins. By default, the job's whole life is visible. */
  from?: number
}

export function TimelineChart({ job, incidents, spans, nodes, now, from: rangeFrom }: Props) {
  const { ref, width } = useElementSize()
  const [most, setMost] = useState(MOST_NODES)
  const data = timeline(job, incidents, spans, nodes, now, most)
  const { to, lanes, hiddenCount } = data
  const from = Math.max(data.from, rangeFrom ?? data.from)
  const isNarrow = width < 500
  const left = isNarrow ? 78 : 176
  const inner = Math.max(10, width - left - 12)
  const x = (at: number) => left + ((Math.min(to, Math.max(from, at)) - from) / Math.max(1e-6, to - from)) * inner
  const moments = ticks(from, to, Math.max(2, inner / TICK))
  const hasLocal = local(to) !== ''
  const axis = hasLocal ? 2 * AXIS : AXIS
  const bottom = lanes.length * LANE
  const total = plural(lanes.length - 1 + hiddenCount, 'node')
  const drawn = hiddenCount ? TIMELINE.some(count(lanes.length - 1), total) : total
  const label = TIMELINE.label(drawn, plural(incidents.length, 'incident'), duration(to - from))
  return (
    <div ref={ref} className="timelinebox">
      {width > 0 && (
        <svg className="timeline" height={bottom + axis + 4} width={width} role="group" aria-label={label}>
          {moments.map((at) => (
            <line key={at} className="axis" x1={x(at)} x2={x(at)} y1={0} y2={bottom + 4} />
          ))}
          {lanes.map((lane, row) => (
            <LaneMarks key={lane.id} lane={lane} y={row * LANE} isNarrow={isNarrow} from={from} x={x} />
          ))}
          <AxisRow
            name={TIMELINE.utc}
            y={bottom + AXIS - 2}
            moments={moments}
            x={x}
            text={(at) => tickText(utc(at), to - from)}
          />
          {hasLocal && (
            <AxisRow
              name={local(to).slice(20)}
              y={bottom + 2 * AXIS - 4}
              moments={moments}
              x={x}
              text={(at) => tickText(local(at), to - from)}
            />
          )}
        </svg>
      )}
      {hiddenCount > 0 && (
        <div className="row">
          <Button size="compact-sm" variant="default" onClick={() => setMost(Infinity)}>
            {TIMELINE.more(plural(hiddenCount, 'more node'))}
          </Button>
          <span className="dim">{TIMELINE.faultsFirst}</span>
        </div>
      )}
      <div className="keys">
        {KEYS.map((kind) => (
          <Key key={kind} kind={kind} word={wordsOf(kind).label} />
        ))}
        <Key kind="node" word={TIMELINE.nodeKey} />
        <span>
          <svg width="12" height="11" aria-hidden="true">
            <path d="M6 0l6 10H0z" fill="var(--bad)" />
          </svg>{' '}
          {TIMELINE.faultKey}
        </span>
      </div>
    </div>
  )
}

/**
 * Return the label of a tick at `time`, for example "2026-03-01 12:00:05 UTC".
 *
 * The label of a long range is the day, of a shorter range the time without seconds, and of a short range with seconds.
 */
function tickText(time: string, rangeSeconds: number): string {
  if (rangeSeconds > 2 * 86_400) return time.slice(5, 10)
  return rangeSeconds > 600 ? time.slice(11, 16) : time.slice(11, 19)
}

interface AxisProps {
  name: string
  y: number
  moments: number[]
  x: (at: number) => number
  text: (at: number) => string
}

function AxisRow({ name, y, moments, x, text }: AxisProps) {
  return (
    <>
      <text x={0} y={y}>
        {name}
      </text>
      {moments.map((at) => (
        <text key={at} x={x(at)} y={y} textAnchor="middle">
          {text(at)}
        </text>
      ))}
    </>
  )
}

interface LaneProps {
  lane: Lane
  y: number
  isNarrow: boolean
  from: number
  x: (at: number) => number
}

function LaneMarks({ lane, y, isNarrow, from, x }: LaneProps) {
  const isNode = lane.id.startsWith('i-')
  const name = isNode && isNarrow ? `…${lane.label.slice(-6)}` : lane.label
  return (
    <g>
      <text className={isNode ? 'lane id' : 'lane'} x={0} y={y + TOP + 12}>
        {isNode && <title>{lane.label}</title>}
        {name}
      </text>
      {lane.spans
        .filter((span) => span.to >= from)
        .map((span) => (
          <Bar
            key={`${span.from} ${span.kind}`}
            span={span}
            y={y}
            least={span.incidentId === undefined ? 1 : 3}
            x={x}
          />
        ))}
      {lane.faults
        .filter((fault) => fault.at >= from)
        .map((fault) => (
          <FaultMark key={`${fault.incidentId} ${fault.at}`} fault={fault} x={x(fault.at)} y={y} />
        ))}
    </g>
  )
}

const incidentPath = (id: string) => `/incidents/${encodeURIComponent(id)}`

function Bar({ span, y, least, x }: { span: Span; y: number; least: number; x: (at: number) => number }) {
  const width = Math.max(least, x(span.to) - x(span.from))
  const length = duration(span.to - span.from)
  const bar = (
    <>
      <rect x={x(span.from)} y={y + TOP} width={width} height={BAR} rx={3} fill={color(span.kind)}>
        <title>{`${span.label}\n${moment(span.from)}, ${length}`}</title>
      </rect>
      {span.word && width > span.word.length * LETTER + 12 && (
        <text className="word" x={x(span.from) + 6} y={y + TOP + 12} aria-hidden="true">
          {span.word}
        </text>
      )}
    </>
  )
  if (span.incidentId === undefined) return bar
  return (
    <Marked to={span.incidentId} label={`${span.label}, ${length}`}>
      {bar}
    </Marked>
  )
}

function FaultMark({ fault, x, y }: { fault: Fault; x: number; y: number }) {
  return (
    <Marked to={fault.incidentId} label={TIMELINE.fault(fault.label)}>
      <path d={`M${x} ${y + 2}l7 12h-14z`} fill="var(--bad)" stroke="var(--card)">
        <title>{`${fault.label}\n${moment(fault.at)}`}</title>
      </path>
    </Marked>
  )
}

function Marked({ to, label, children }: { to: string; label: string; children: ReactNode }) {
  return (
    <Link to={incidentPath(to)} aria-label={label}>
      {children}
    </Link>
  )
}

function Key({ kind, word }: { kind: string; word: string }) {
  return (
    <span className="row">
      <span className="key" style={{ background: color(kind) }} /> {word}
    </span>
  )
}
