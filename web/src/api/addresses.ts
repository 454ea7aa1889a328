/** The text that addresses one job in paths and requests: its name, or its RunId where the name is not enough. */
import { useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'
import { useParams } from 'react-router'

import { addressesOf, type Named } from '../model/jobs'
import { jobsQuery } from './queries'

/** Addresses for links to jobs from lists. */
export function useJobAddresses(): (job: Named) => string {
  const jobs = useQuery({ ...jobsQuery, refetchInterval: false }).data
  return useMemo(() => addressesOf(jobs ?? []), [jobs])
}

/** On the pages of a job: the address under which the user opened them. */
export const useJobAddress = (job: Named): string => useParams().name ?? job.TrainingJobName
