/** Identifies a job in URLs and requests: by its name, or by its RunId if jobs of several projects have the name. */
import { useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'
import { useParams } from 'react-router'

import { addressesOf, type Named } from '../model/jobs'
import { jobsQuery } from './queries'

/** Return a function from a job in a list to the address (name or RunId) that a link to the job contains. */
export function useJobAddresses(): (job: Named) => string {
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data
  return useMemo(() => addressesOf(jobs ?? []), [jobs])
}

/** Return the address (name or RunId) in the URL of a job's open page. On other pages, return the job's name. */
export const useJobAddress = (job: Named): string => useParams().name ?? job.TrainingJobName
