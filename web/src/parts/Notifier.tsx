/** Shows a browser notification when a watched job needs a person now. Draws nothing. */
import { useQuery } from '@tanstack/react-query'
import { useEffect, useRef } from 'react'
import { useNavigate } from 'react-router'

import { jobsQuery } from '../api/queries'
import type { TrainingJobSummary } from '../contract'
import { addressesOf } from '../model/jobs'
import { WATCH } from '../words/people'

/** Poll interval of the list of jobs. A hidden tab, which has no event stream, also polls. */
const INTERVAL_MS = 10_000

export default function Notifier({ runIds }: { runIds: ReadonlySet<string> }) {
  const navigate = useNavigate()
  const jobs = useQuery({ ...jobsQuery, refetchInterval: INTERVAL_MS, refetchIntervalInBackground: true }).data
  const known = useRef<ReadonlySet<string>>(undefined)
  useEffect(() => {
    if (jobs === undefined) return
    const addressOf = addressesOf(jobs)
    const urgent = jobs.filter((job) => runIds.has(job.RunId) && job.Duty?.Urgency === 'Now')
    const keyOf = (job: TrainingJobSummary) => `${job.RunId} ${job.Duty!.Kind}`
    // The first answer causes no notification, because its duties may be hours old and the page shows them.
    for (const job of known.current ? urgent.filter((each) => !known.current!.has(keyOf(each))) : []) {
      const title = WATCH.heading(job.TrainingJobName)
      const shown = new Notification(title, { body: job.Duty!.Sentence, tag: keyOf(job) })
      shown.onclick = () => {
        window.focus()
        void navigate(`/jobs/${encodeURIComponent(addressOf(job))}`)
      }
    }
    known.current = new Set(urgent.map(keyOf))
  }, [jobs, runIds, navigate])
  return null
}
