/** What the script logged, one chart a name, with the steps of recoveries as bands. */
import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'

import { incidentsQuery, metricsQuery } from '../api/queries'
import { MetricChart } from '../charts/MetricChart'
import type { TrainingJob } from '../contract'
import { csv, series } from '../model/metrics'
import { Empty, Shown } from '../parts/Basics'

export default function MetricsTab({ job }: { job: TrainingJob }) {
  const query = useQuery(metricsQuery(job.TrainingJobName))
  const incidents = useQuery(incidentsQuery(job.TrainingJobName)).data
  const bands = useMemo(
    () => (incidents ?? []).filter((each) => each.RunId === job.RunId && each.FromStep !== undefined && each.ReachedStep !== undefined).map((each) => ({ from: each.FromStep!, to: each.ReachedStep! })),
    [incidents, job.RunId],
  )
  const data = useMemo(() => series(query.data ?? []), [query.data])
  return (
    <Shown query={query}>
      {(metrics) =>
        metrics.length ? (
          <div className="stack">
            <div className="charts">
              {data.names.map((name) => (
                <section className="card" key={name}>
                  <MetricChart name={name} steps={data.steps} values={data.values[name]!} bands={bands} />
                </section>
              ))}
            </div>
            <div className="row between">
              <span className="dim">Bands: steps done again after a failure. Drag to zoom, double click for all. A point of a long run is the mean of several steps.</span>
              <Button
                size="xs"
                variant="default"
                onClick={() => {
                  const url = URL.createObjectURL(new Blob([csv(data)], { type: 'text/csv' }))
                  const link = Object.assign(document.createElement('a'), { href: url, download: `${job.TrainingJobName}-metrics.csv` })
                  link.click()
                  URL.revokeObjectURL(url)
                }}
              >
                CSV
              </Button>
            </div>
          </div>
        ) : (
          <Empty title="Nothing has been logged" command={'session.log(loss=loss.item())  # in the training loop, on rank 0'}>
            What rank 0 logs is drawn here. Step times, network and GPU figures are not in the API yet.
          </Empty>
        )
      }
    </Shown>
  )
}
