/** Buttons for the head of a job's page: take the job out of the trash, clone it, and watch it. */
import { Button } from '@mantine/core'
import { Link } from 'react-router'

import { call } from '../api/client'
import { useRole } from '../api/queries'
import type { TrainingJob } from '../contract'
import { JOB } from '../words/job'
import { JOB_PEOPLE, WATCH } from '../words/people'
import { ActionButton } from './ActionButton'
import { toggleWatched, useWatching } from './watching'

export function JobButtons({ job }: { job: Pick<TrainingJob, 'RunId' | 'PurgeTime'> }) {
  const { mayRun } = useRole()
  const { runIds } = useWatching()
  return (
    <>
      {job.PurgeTime !== undefined && (
        <ActionButton
          operation="UndeleteTrainingJob"
          action={() => call('UndeleteTrainingJob', { TrainingJobName: job.RunId })}
          title={JOB.actions.undeleteTitle}
        >
          {JOB.actions.undelete}
        </ActionButton>
      )}
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
