/** What the pages ask the API, how often, and under which key it is kept. What events tell is asked for at once (`live.ts`); the rest in between. */
import { queryOptions, useQuery } from '@tanstack/react-query'

import type { Drill, Event, Incident, Token, TrainingJobSummary } from '../contract'
import { all, call, session } from './client'
import { stream } from './live'

const FAST_MS = 2_000
const SLOW_MS = 10_000
/** For what events tell, too: often only while they do not come. */
const told = () => (stream.isOpen ? SLOW_MS : FAST_MS)
/** What one page holds of the newest events; the API lists the oldest first, so more than this is reached by asking on. */
const EVENT_LIMIT = 20_000

export const sessionQuery = queryOptions({ queryKey: ['session'], queryFn: ({ signal }) => session.describe(signal), refetchInterval: 60_000, retry: false })

export const jobsQuery = queryOptions({
  queryKey: ['jobs'],
  queryFn: ({ signal }): Promise<TrainingJobSummary[]> =>
    all(async (NextToken) => {
      const page = await call('ListTrainingJobs', { MaxResults: 1000, NextToken }, signal)
      return { items: page.TrainingJobSummaries ?? [], next: page.NextToken }
    }),
  refetchInterval: FAST_MS,
})

export const jobQuery = (name: string) =>
  queryOptions({ queryKey: ['job', name], queryFn: ({ signal }) => call('DescribeTrainingJob', { TrainingJobName: name }, signal), refetchInterval: FAST_MS })

export const protectionQuery = (name: string) =>
  queryOptions({ queryKey: ['protection', name], queryFn: ({ signal }) => call('DescribeProtection', { TrainingJobName: name }, signal), refetchInterval: FAST_MS })

export const incidentsQuery = (job?: string) =>
  queryOptions({
    queryKey: ['incidents', job ?? ''],
    queryFn: ({ signal }): Promise<Incident[]> =>
      all(async (NextToken) => {
        const page = await call('ListIncidents', { TrainingJobName: job, MaxResults: 1000, NextToken }, signal)
        return { items: page.Incidents ?? [], next: page.NextToken }
      }),
    refetchInterval: (query) => (query.state.data?.some((each) => each.ClosedAt === undefined) ? FAST_MS : told()), // no event tells when one is over
  })

export const incidentQuery = (id: string) =>
  queryOptions({ queryKey: ['incident', id], queryFn: ({ signal }) => call('DescribeIncident', { IncidentId: id }, signal), refetchInterval: told })

const PRINTED_LINES = 20
const AFTER_SECONDS = 1

/** What the launch that failed printed last, up to a moment after the failure: a traceback comes with the exit. It does not change any more. */
export const printedQuery = ({ IncidentId, TrainingJobName, GenerationBefore, FailedAt }: Incident) =>
  queryOptions({
    queryKey: ['printed', IncidentId, FailedAt],
    queryFn: async ({ signal }) => (await call('GetLogEvents', { TrainingJobName, Generation: GenerationBefore, EndTime: FailedAt + AFTER_SECONDS, Limit: PRINTED_LINES }, signal)).Events ?? [],
    staleTime: Infinity,
  })

/** All events, oldest first; a refresh asks only for what came after the last one that is held. */
export const eventsQuery = (scope: { job?: string; fleet?: string }) => {
  const queryKey = ['events', scope.job ?? '', scope.fleet ?? '']
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }): Promise<Event[]> => {
      const held = client.getQueryData<Event[]>(queryKey) ?? []
      const AfterEventId = held.at(-1)?.EventId ?? 0
      const fresh = await all(async (NextToken) => {
        const page = await call('ListEvents', { TrainingJobName: scope.job, FleetName: scope.fleet, AfterEventId, MaxResults: 1000, NextToken }, signal)
        return { items: page.Events ?? [], next: page.NextToken }
      }, EVENT_LIMIT)
      return fresh.length ? [...held, ...fresh].slice(-EVENT_LIMIT) : held
    },
    refetchInterval: told,
  })
}

export const fleetsQuery = queryOptions({ queryKey: ['fleets'], queryFn: async ({ signal }) => (await call('ListFleets', {}, signal)).Fleets ?? [], refetchInterval: told })

export const nodesQuery = (fleet?: string, ended = false) =>
  queryOptions({
    queryKey: ['nodes', fleet ?? '', ended],
    queryFn: async ({ signal }) => (await call('ListNodes', { FleetName: fleet, IncludeEnded: ended }, signal)).Nodes ?? [],
    refetchInterval: told,
  })

export const checkpointsQuery = (name: string) =>
  queryOptions({ queryKey: ['checkpoints', name], queryFn: async ({ signal }) => (await call('ListCheckpoints', { TrainingJobName: name }, signal)).Checkpoints ?? [], refetchInterval: SLOW_MS })

export const logsQuery = (name: string) =>
  queryOptions({ queryKey: ['logs', name], queryFn: async ({ signal }) => (await call('ListLogs', { TrainingJobName: name }, signal)).Logs ?? [], refetchInterval: SLOW_MS })

/** A new revision has another key: it is asked for at once. */
export const revisionsQuery = (name: string, revision: number) =>
  queryOptions({ queryKey: ['revisions', name, revision], queryFn: async ({ signal }) => (await call('ListTrainingJobRevisions', { TrainingJobName: name }, signal)).Revisions ?? [], staleTime: SLOW_MS })

/** In the order they were asked for. */
export const drillsQuery = queryOptions({
  queryKey: ['drills'],
  queryFn: ({ signal }): Promise<Drill[]> =>
    all(async (NextToken) => {
      const page = await call('ListDrills', { MaxResults: 1000, NextToken }, signal)
      return { items: page.Drills ?? [], next: page.NextToken }
    }),
  refetchInterval: told,
})

export const tokensQuery = (ended: boolean) =>
  queryOptions({
    queryKey: ['tokens', ended],
    queryFn: ({ signal }): Promise<Token[]> =>
      all(async (NextToken) => {
        const page = await call('ListTokens', { IncludeEnded: ended, MaxResults: 1000, NextToken }, signal)
        return { items: page.Tokens ?? [], next: page.NextToken }
      }),
  })

/** Whether the one who is signed in may change something: buttons that would fail are not shown. */
export function useRole(): { mayRun: boolean; isAdmin: boolean } {
  const role = useQuery(sessionQuery).data?.Role
  return { mayRun: role === 'submitter' || role === 'admin', isAdmin: role === 'admin' }
}
