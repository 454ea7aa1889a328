/** What the script logged and what Everstep measures, one chart a name, over steps or time, with failures as bands. */
import { Button, SegmentedControl, useComputedColorScheme } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useCallback, useMemo, useState } from 'react'
import { Link, useSearchParams } from 'react-router'

import { metricsQuery } from '../api/metrics'
import { useJobAddress } from '../api/addresses'
import { incidentsQuery } from '../api/queries'
import { MetricChart } from '../charts/MetricChart'
import type { TrainingJob } from '../contract'
import { clock, count } from '../model/format'
import { bands, csv, isCoarse, joined, series, standstills, type Axis, type Point, type Series, type Window } from '../model/metrics'
import { extremes, ownNames, scriptNames, titleOf } from '../model/ownMetrics'
import { causeWords } from '../model/verdict'
import { Empty, NodeLink, Shown, useNow } from '../parts/Basics'
import { download } from '../parts/download'

const MOST_TOLD = 12
const NONE: Point[] = []

export default function MetricsTab({ job }: { job: TrainingJob }) {
  const [search, setSearch] = useSearchParams()
  const address = useJobAddress(job)
  const query = useQuery(metricsQuery(address))
  const incidents = useQuery(incidentsQuery(address)).data
  const scheme = useComputedColorScheme('light')
  const now = useNow()
  const axis: Axis = search.get('axis') === 'wall' ? 'wall' : 'step'
  const [seen, setSeen] = useState<Window>()
  const onWindow = useCallback((window?: Window) => setSeen((before) => (before?.axis === window?.axis && before?.from === window?.from && before?.to === window?.to ? before : window)), [])
  const window = seen?.axis === axis && isCoarse(query.data ?? NONE, seen) ? seen : undefined
  const detail = useQuery({ ...metricsQuery(address, window), enabled: window !== undefined }).data
  const points = useMemo(() => (window && detail ? joined(query.data ?? NONE, detail) : (query.data ?? NONE)), [query.data, detail, window])
  const mine = useMemo(() => (incidents ?? []).filter((each) => each.RunId === job.RunId), [incidents, job.RunId])
  const isOpen = mine.some((each) => each.ClosedAt === undefined)
  const failures = useMemo(() => bands(mine, axis, now), [mine, axis, isOpen && now])
  const gaps = useMemo(() => [...failures, ...standstills(job.SecondaryStatusTransitions)], [failures, job.SecondaryStatusTransitions])
  const [script, own] = useMemo(() => {
    const lines = (names: string[]) => names.map((name) => ({ name, of: series(points, name, axis, gaps) }))
    return [lines(scriptNames(points)), lines(ownNames(points))] as const
  }, [points, axis, gaps])
  return (
    <Shown query={query}>
      {() =>
        points.length ? (
          <div className="stack">
            <div className="row between">
              <SegmentedControl
                size="xs"
                aria-label="Over"
                value={axis}
                onChange={(value) => setSearch(value === 'wall' ? { axis: 'wall' } : {}, { replace: true, preventScrollReset: true })}
                data={[{ value: 'step', label: 'Steps' }, { value: 'wall', label: 'Time' }]}
              />
              <Button size="xs" variant="default" onClick={() => download(`${job.TrainingJobName}-metrics.csv`, [csv(points)], 'text/csv')}>
                CSV
              </Button>
            </div>
            {own.length > 0 && <h2>What the script logs</h2>}
            {!script.length && <p className="dim">Nothing yet: <code>session.log(loss=loss.item())</code> in the training loop, on rank 0.</p>}
            <div className="charts">
              {script.map(({ name, of }) => (
                <section className="card" key={name}>
                  <MetricChart name={name} axis={axis} of={of} bands={failures} scheme={scheme} onWindow={onWindow} />
                </section>
              ))}
            </div>
            {own.length > 0 && (
              <section className="stack" aria-labelledby="own-metrics">
                <h2 id="own-metrics">What Everstep measures</h2>
                <div className="charts">
                  {own.map(({ name, of }) => (
                    <section className="card" key={name}>
                      <MetricChart name={titleOf(name)} axis={axis} of={of} bands={failures} scheme={scheme} onWindow={onWindow} />
                      <Extremes name={name} of={of} fleet={job.FleetName} />
                    </section>
                  ))}
                </div>
                <p className="dim">Means of about five seconds. The line is the median of the nodes, the shade reaches from the least to the most of them; whose those are is in the legend below the cursor.</p>
              </section>
            )}
            <p className="dim">
              {axis === 'wall' ? 'Bands: from a failure until training was where it had been; times in UTC.' : 'Bands: steps done again after a failure.'} A point of a long run is the mean of several steps, between their least and their most. Drag to zoom, in all charts at once, until every step is there; double click for all.
            </p>
            {failures.length > 0 && (
              <ul className="plain row" aria-label="Failures in these charts">
                {failures.slice(-MOST_TOLD).map((band) => (
                  <li key={band.incidentId}>
                    <Link to={`/incidents/${encodeURIComponent(band.incidentId)}`}>{causeWords(band.cause)}</Link> <span className="dim">{axis === 'wall' ? clock(band.from) : `step ${count(band.to)}`}</span>
                  </li>
                ))}
              </ul>
            )}
          </div>
        ) : (
          <Empty title="Nothing has been logged" command={'session.log(loss=loss.item())  # in the training loop, on rank 0'}>
            What rank 0 logs is drawn here.
          </Empty>
        )
      }
    </Shown>
  )
}

/** Which nodes stand out, by the newest point. */
function Extremes({ name, of, fleet }: { name: string; of: Series; fleet: string }) {
  const found = extremes(name, of)
  return (
    found && (
      <p className="dim extremes">
        Least {found.least.value} on <NodeLink id={found.least.node} fleet={fleet} />, median {found.median}, most {found.most.value} on <NodeLink id={found.most.node} fleet={fleet} />
      </p>
    )
  )
}
