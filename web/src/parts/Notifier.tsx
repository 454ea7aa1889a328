/** Shows a browser notification when a watched job needs a person now. Draws nothing. */
import { useQuery } from '@tanstack/react-query'
import { useEffect, useRef } from 'react'
import { useNavigate } from 'react-router'

import { serverTime } from '../api/client'
import { jobsQuery } from '../api/queries'
import { alertsOf, newAlerts } from '../model/notifications'

/** Poll interval of the list of jobs. A hidden tab, which has no event stream, also polls. */
const INTERVAL_MS = 10_000

export default function Notifier({ runIds }: { runIds: ReadonlySet<string> }) {
  const navigate = useNavigate()
  const jobs = useQuery({ ...jobsQuery, refetchInterval: INTERVAL_MS, refetchIntervalInBackground: true }).data
  const known = useRef<ReadonlySet<string>>(undefined)
  useEffect(() => {
    if (jobs === undefined) return
    const alerts = alertsOf(jobs, runIds, serverTime())
    for (const alert of newAlerts(alerts, known.current)) {
      const shown = new Notification(alert.title, { body: alert.body, tag: alert.key })
      shown.onclick = () => {
        window.focus()
        void navigate(alert.to)
      }
    }
    known.current = new Set(alerts.map((alert) => alert.key))
  }, [jobs, runIds, navigate])
  return null
}
