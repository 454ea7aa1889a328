/** The recovery timeline: the job's states, its recoveries in phases, and a lane for each node. */
import { Button } from '@mantine/core'
import { useElementSize } from '@mantine/hooks'
import { useState } from 'react'
import { Link } from 'react-router'

import type { Incident, TrainingJob, TrainingJobNode } from '../contract'
import { clock, duration, plural, utc } from '../model/format'
import { MOST_NODES, ticks, timeline, type Span } from '../model/timeline'

const COLOURS: Record<string, string> = {
  training: 'train', pending: 'queue', starting: 'start', downloading: 'start', restarting: 'replace', stopping: 'stopping',
  detect: 'detect', replace: 'replace', restore: 'restore', rework: 'rework', node: 'node', completed: 'train', failed: 'detect', stopped: 'stopping',
  pausing: 'stopping', paused: 'paused', interrupted: 'paused',
}
const LANE = 26
const colour = (kind: string) => `var(--b-${COLOURS[kind] ?? 'rest'})`

export function TimelineChart({ job, incidents, nodes, now, from: zoomFrom }: { job: Partial<TrainingJob>; incidents: Incident[]; nodes: TrainingJobNode[]; now: number; from?: number }) {
  const { ref, width } = useElementSize()
  const [most, setMost] = useState(MOST_NODES)
  const data = timeline(job, incidents, nodes, now, most)
  const from = Math.max(data.from, zoomFrom ?? data.from)
  const { to, lanes, hiddenCount } = data
  const left = width < 500 ? 74 : 170
  const inner = Math.max(10, width - left - 10)
  const x = (at: number) => left + (Math.min(to, Math.max(from, at)) - from) / Math.max(1e-6, to - from) * inner
  const height = lanes.length * LANE + 30
  const visible = (span: Span) => span.to >= from
  return (
    <div ref={ref}>
      {width > 0 && (
        <svg className="timeline" height={height} width={width} role="group" aria-label={`Timeline of ${lanes.length - 2}${hiddenCount ? ` of ${lanes.length - 2 + hiddenCount}` : ''} nodes and ${incidents.length} incidents over ${duration(to - from)}`}>
          {ticks(from, to, Math.max(2, inner / 90)).map((at) => (
            <g key={at}>
              <line className="axis" x1={x(at)} x2={x(at)} y1={0} y2={height - 22} />
              <text x={x(at)} y={height - 8} textAnchor="middle">
                {to - from > 172800 ? utc(at).slice(5, 10) : clock(at).slice(0, to - from > 3600 ? 5 : 8)}
              </text>
            </g>
          ))}
          {lanes.map((lane, row) => {
            const y = row * LANE
            return (
              <g key={lane.id}>
                <text className="lane" x={0} y={y + 17}>
                  {left < 100 && lane.label.startsWith('i-') ? `…${lane.label.slice(-6)}` : lane.label}
                </text>
                {lane.spans.filter(visible).map((span, index) => {
                  const mark = (
                    <rect x={x(span.from)} y={y + 6} width={Math.max(lane.id === 'recovery' ? 3 : 1, x(span.to) - x(span.from))} height={LANE - 11} rx={2} fill={colour(span.kind)}>
                      <title>{`${span.label}\n${utc(span.from)}, ${duration(span.to - span.from)}`}</title>
                    </rect>
                  )
                  return span.incidentId ? (
                    <Link key={index} to={`/incidents/${encodeURIComponent(span.incidentId)}`} aria-label={`${span.label}, ${duration(span.to - span.from)}`}>
                      {mark}
                    </Link>
                  ) : (
                    <g key={index}>{mark}</g>
                  )
                })}
                {lane.faults
                  .filter((fault) => fault.at >= from)
                  .map((fault) => (
                    <Link key={`${fault.incidentId}${fault.at}`} to={`/incidents/${encodeURIComponent(fault.incidentId)}`} aria-label={`Fault: ${fault.label}`}>
                      <path d={`M${x(fault.at)} ${y + 1}l6 10h-12z`} fill="var(--bad)" stroke="var(--card)">
                        <title>{`${fault.label}\n${utc(fault.at)}`}</title>
                      </path>
                    </Link>
                  ))}
              </g>
            )
          })}
        </svg>
      )}
      {hiddenCount > 0 && (
        <div className="row" style={{ marginTop: 8 }}>
          <Button size="compact-xs" variant="default" onClick={() => setMost(Infinity)}>
            Show the lanes of {plural(hiddenCount, 'more node')}
          </Button>
          <span className="dim">Nodes where something failed come first.</span>
        </div>
      )}
      <div className="keys">
        {[['training', 'training'], ['starting', 'starting'], ['detect', 'detect'], ['replace', 'replace'], ['restore', 'restore'], ['rework', 'rework'], ['node', 'node works for the job']].map(([kind, label]) => (
          <span key={kind}>
            <span className="key" style={{ background: colour(kind!) }} /> {label}
          </span>
        ))}
        <span>
          <svg width="12" height="11" aria-hidden="true">
            <path d="M6 0l6 10H0z" fill="var(--bad)" />
          </svg>{' '}
          fault
        </span>
        <span>times in UTC</span>
      </div>
    </div>
  )
}
