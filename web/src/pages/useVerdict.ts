/** Computes the verdict on a job (its state and what to do) from the API's answers, for all tabs of the job page. */
import { useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'

import { useJobAddress } from '../api/addresses'
import { serverTime } from '../api/client'
import {
  fleetsQuery,
  incidentQuery,
  incidentsQuery,
  jobsQuery,
  openIncidentsQuery,
  protectionQuery,
} from '../api/queries'
import type { Incident, TrainingJob } from '../contract'
import { progressOf, sampled, type Sample } from '../model/progress'
import { hitAlike, openIncident, usualRate, verdict } from '../model/verdict'
import { useIsStale, useNow } from '../parts/Basics'

/** The steps of each job that this browser has observed, by RunId. */
const observed = new Map<string, Sample[]>()

export type JobVerdict = ReturnType<typeof useVerdict>

/** `dataUpdatedAt`: when the job's description arrived, in milliseconds. `error`: why it was not renewed since. */
export function useVerdict(job: TrainingJob, dataUpdatedAt: number, error: unknown) {
  const now = useNow()
  const at = serverTime(dataUpdatedAt)
  const isStale = useIsStale() || error !== null
  const address = useJobAddress(job)
  const protection = useQuery(protectionQuery(address)).data
  const open = useQuery(openIncidentsQuery).data ?? []
  const ofName = useQuery(incidentsQuery(address)).data
  const fleet = useQuery(fleetsQuery).data?.find((each) => each.FleetName === job.FleetName)
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data // no polls, because events renew the list
  const samples = useMemo(() => {
    const next = sampled(observed.get(job.RunId) ?? [], { at, boundary: job.Boundary })
    observed.set(job.RunId, next)
    return next
  }, [job.RunId, job.Boundary, at])
  /** Incidents of this run, oldest first. */
  const incidents = useMemo(() => (ofName ?? []).filter((each) => each.RunId === job.RunId), [ofName, job.RunId])
  const isNeighbour = (each: { FleetName: string; RunId: string }) =>
    each.FleetName === job.FleetName && each.RunId !== job.RunId
  const neighbours = new Set((jobs ?? []).filter(isNeighbour).map((each) => each.RunId))
  const progress = progressOf(samples, usualRate(job))
  /** The open incident, or the latest one, with its outcome, verdict and actions once these have arrived. */
  const incident = useAccount(openIncident(incidents) ?? incidents.at(-1))
  const result = verdict({
    job,
    protection,
    incidents,
    fleet,
    progress,
    isStale,
    now,
    othersHit: hitAlike(job, openIncident(incidents), open, neighbours),
  })
  return { verdict: result, progress, protection, incidents, incident }
}

/** Return a listed incident with the fields that only DescribeIncident returns, if both show the same phase. */
function useAccount(listed: Incident | undefined): Incident | undefined {
  const described = useQuery({ ...incidentQuery(listed?.IncidentId ?? ''), enabled: listed !== undefined }).data
  if (listed === undefined || described?.IncidentId !== listed.IncidentId) return listed
  if (described.Phase !== listed.Phase) return listed
  const { Why, Done, Wait, Actions } = described
  return { ...listed, Why, Done, Wait, Actions }
}
