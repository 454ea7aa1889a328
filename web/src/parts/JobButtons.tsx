/** Buttons for the head of a job's page: clone the job, and watch it. */
import { Button } from '@mantine/core'
import { Link } from 'react-router'

import { useRole } from '../api/queries'
import type { TrainingJob } from '../contract'
import { JOB_PEOPLE, WATCH } from '../words/people'
import { toggleWatched, useWatching } from './watching'

export function JobButtons({ job }: { job: Pick<TrainingJob, 'RunId'> }) {
  const { mayRun } = useRole()
  const { runIds } = useWatching()
  return (
    <>
      {mayRun && (
        <Button component={Link} size="xs" variant="default" to={`/submit?from=${encodeURIComponent(job.RunId)}`}>
          {JOB_PEOPLE.clone}
        </Button>
      )}
      <Button size="xs" variant="default" aria-pressed={runIds.has(job.RunId)} onClick={() => toggleWatched(job.RunId)}>
        {runIds.has(job.RunId) ? WATCH.unwatch : WATCH.watch}
      </Button>
    </>
  )
}
