/** The pages' requests: how often each is repeated, and its key. Events renew queries at once (`live.ts`). */
import { keepPreviousData, queryOptions, useQuery, type QueryClient } from '@tanstack/react-query'

import type { Drill, Event, Incident, Operations, Token, TrainingJobSummary } from '../contract'
import { merged, newestFirst, START } from '../model/changes'
import { all, call, session } from './client'
import { stream } from './live'

const FAST_MS = 2_000
const SLOW_MS = 10_000
/** For what events tell, too: often only while they do not come. */
const told = () => (stream.isOpen ? SLOW_MS : FAST_MS)
/** Pause between two polls of figures that grow with every step. Events report changes of state at once. */
const STEPS_MS = 4_000
const steps = () => (stream.isOpen ? STEPS_MS : FAST_MS)
/** What is asked for at once of what may be many; the newest come first. */
const PAGE = 1_000
/** Incidents of one job: as many as a timeline can tell of. */
const MOST_OF_JOB = 5_000
/** As many as have their agents at one control plane. */
const MOST_NODES = 10_000

export const sessionQuery = queryOptions({
  queryKey: ['session'],
  queryFn: ({ signal }) => session.describe(signal),
  refetchInterval: 60_000,
  retry: false,
})

/** A page of the list of jobs as the last response left it. */
interface JobsPage {
  token: string
  jobs: ReadonlyMap<string, TrainingJobSummary>
}

/** The pages of the list of jobs, so that a refresh receives only the jobs that changed. */
let jobsPages: JobsPage[] = []
const MAX_JOBS = 5_000

/** All jobs, the newest first. */
export const jobsQuery = queryOptions({
  queryKey: ['jobs'],
  queryFn: async ({ signal }): Promise<TrainingJobSummary[]> => {
    const pages: JobsPage[] = []
    await all(async (NextToken) => {
      const held = jobsPages[pages.length]
      const asked = { MaxResults: PAGE, NextToken, ChangesSince: held?.token ?? START }
      const { TrainingJobSummaries: changed = [], ...answer } = await call('ListTrainingJobs', asked, signal)
      const jobs = merged(held?.jobs ?? new Map(), answer.Changes, changed, (job) => job.RunId)
      pages.push({ token: answer.Changes?.ChangeToken ?? START, jobs })
      return { items: [...jobs.values()], next: answer.NextToken }
    }, MAX_JOBS)
    jobsPages = pages
    return newestFirst(new Map(pages.flatMap((page) => [...page.jobs])))
  },
  refetchInterval: FAST_MS,
})

export const jobQuery = (name: string) =>
  queryOptions({
    queryKey: ['job', name],
    queryFn: ({ signal }) => call('DescribeTrainingJob', { TrainingJobName: name }, signal),
    refetchInterval: steps,
  })

export const protectionQuery = (name: string) =>
  queryOptions({
    queryKey: ['protection', name],
    queryFn: ({ signal }) => call('DescribeProtection', { TrainingJobName: name }, signal),
    refetchInterval: steps,
  })

/** The newest incidents, the oldest of them first. */
const incidents = (
  which: { TrainingJobName?: string; StatusEquals?: 'Open' }, limit: number, signal: AbortSignal,
): Promise<Incident[]> =>
  all(async (NextToken) => {
    const page = await call('ListIncidents', { ...which, SortOrder: 'Descending', MaxResults: PAGE, NextToken }, signal)
    return { items: page.Incidents ?? [], next: page.NextToken }
  }, limit).then((found) => found.toReversed())

/** Of one job, or the newest of all. */
export const incidentsQuery = (job?: string) =>
  queryOptions({
    queryKey: ['incidents', job ?? ''],
    queryFn: ({ signal }) => incidents({ TrainingJobName: job }, job === undefined ? PAGE : MOST_OF_JOB, signal),
    // The end of an incident has no event.
    refetchInterval: (query) => (query.state.data?.some((each) => each.ClosedAt === undefined) ? FAST_MS : told()),
  })

/** Those from which a job has not recovered yet. */
export const openIncidentsQuery = queryOptions({
  queryKey: ['incidents', '', 'open'],
  queryFn: ({ signal }) => incidents({ StatusEquals: 'Open' }, PAGE, signal),
  refetchInterval: told,
})

export const incidentQuery = (id: string) =>
  queryOptions({
    queryKey: ['incident', id],
    queryFn: ({ signal }) => call('DescribeIncident', { IncidentId: id }, signal),
    refetchInterval: told,
  })

/** The most similar first. */
export const similarIncidentsQuery = (id: string) =>
  queryOptions({
    queryKey: ['incident', id, 'similar'],
    queryFn: async ({ signal }) => (await call('ListSimilarIncidents', { IncidentId: id }, signal)).Incidents ?? [],
    staleTime: 60_000,
  })

/** Notes of a job, oldest first, without the notes of its incidents. */
export const jobNotesQuery = (name: string) =>
  queryOptions({
    queryKey: ['notes', name],
    queryFn: async ({ signal }) => (await call('ListTrainingJobNotes', { TrainingJobName: name }, signal)).Notes ?? [],
    refetchInterval: SLOW_MS,
  })

const PRINTED_LINES = 20
const AFTER_SECONDS = 1

/** The last lines of the failed launch, up to a moment after the failure, because a traceback follows the exit. */
export const printedQuery = ({ IncidentId, RunId, GenerationBefore, FailedAt }: Incident) =>
  queryOptions({
    queryKey: ['printed', IncidentId, FailedAt],
    queryFn: async ({ signal }) => {
      const which = { TrainingJobName: RunId, Generation: GenerationBefore, EndTime: FailedAt + AFTER_SECONDS }
      return (await call('GetLogEvents', { ...which, Limit: PRINTED_LINES }, signal)).Events ?? []
    },
    staleTime: Infinity,
  })

type Scope = { job?: string; fleet?: string }

/** The newest events, the oldest first. A refresh requests later events only. `olderEvents` requests earlier ones. */
export const eventsQuery = (scope: Scope) => {
  const queryKey = ['events', scope.job ?? '', scope.fleet ?? '']
  const asked = { TrainingJobName: scope.job, FleetName: scope.fleet, MaxResults: PAGE }
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }): Promise<Told> => {
      const held = client.getQueryData<Told>(queryKey)
      const last = held?.events.at(-1)?.EventId
      if (held === undefined || last === undefined) {
        const page = await call('ListEvents', { ...asked, SortOrder: 'Descending' }, signal)
        return { events: (page.Events ?? []).toReversed(), older: page.NextToken }
      }
      const fresh = await all(async (NextToken) => {
        const page = await call('ListEvents', { ...asked, AfterEventId: last, NextToken }, signal)
        return { items: page.Events ?? [], next: page.NextToken }
      })
      const now = client.getQueryData<Told>(queryKey) ?? held // older ones may have come meanwhile
      return fresh.length ? { ...now, events: [...now.events, ...fresh] } : now
    },
    refetchInterval: told,
  })
}

/** Events as far as they are held. */
export interface Told {
  events: Event[]
  /** Where those begin that came before; absent where there are none. */
  older?: string
}

/** Hold the page of events before those that are held. */
export async function olderEvents(client: QueryClient, scope: Scope): Promise<void> {
  const { queryKey } = eventsQuery(scope)
  const NextToken = client.getQueryData<Told>(queryKey)?.older
  if (NextToken === undefined) return
  const asked = { TrainingJobName: scope.job, FleetName: scope.fleet, MaxResults: PAGE }
  const page = await call('ListEvents', { ...asked, SortOrder: 'Descending', NextToken })
  const older = (page.Events ?? []).toReversed()
  client.setQueryData<Told>(queryKey, (held) =>
    held?.older === NextToken ? { events: [...older, ...held.events], older: page.NextToken } : held)
}

/** What happened around an incident; while it is open, up to now. */
export const eventsAroundQuery = (incident: Incident, seconds: number) =>
  queryOptions({
    queryKey: ['events', incident.TrainingJobName, 'around', incident.IncidentId, incident.ClosedAt],
    queryFn: async ({ signal }): Promise<Event[]> => {
      const { RunId, FailedAt, ClosedAt } = incident
      const TimeBefore = ClosedAt === undefined ? undefined : ClosedAt + seconds
      const asked = { TrainingJobName: RunId, TimeAfter: FailedAt - seconds, TimeBefore, MaxResults: 200 }
      return (await call('ListEvents', asked, signal)).Events ?? []
    },
    refetchInterval: incident.ClosedAt === undefined ? told : false,
  })

export const fleetsQuery = queryOptions({
  queryKey: ['fleets'],
  queryFn: ({ signal }) =>
    all(async (NextToken) => {
      const page = await call('ListFleets', { MaxResults: 1000, NextToken }, signal)
      return { items: page.Fleets ?? [], next: page.NextToken }
    }),
  refetchInterval: told,
})

/** Of one fleet, or of all. */
export const nodesQuery = (fleet?: string, ended = false) =>
  queryOptions({
    queryKey: ['nodes', fleet ?? '', ended],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const asked = { FleetName: fleet, IncludeEnded: ended, MaxResults: 1000, NextToken }
        const page = await call('ListNodes', asked, signal)
        return { items: page.Nodes ?? [], next: page.NextToken }
      }, MOST_NODES),
    refetchInterval: told,
  })

/** One that a link leads to, though it has ended. */
export const nodeQuery = (id: string) =>
  queryOptions({
    queryKey: ['nodes', 'one', id],
    queryFn: ({ signal }) => call('DescribeNode', { NodeId: id }, signal),
    refetchInterval: told,
  })

/** Which nodes worked for a job, and when. */
export const jobNodesQuery = (name: string) =>
  queryOptions({
    queryKey: ['job', name, 'nodes'],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const page = await call('ListTrainingJobNodes', { TrainingJobName: name, MaxResults: 1000, NextToken }, signal)
        return { items: page.Nodes ?? [], next: page.NextToken }
      }),
    refetchInterval: told,
  })

export const checkpointsQuery = (name: string) =>
  queryOptions({
    queryKey: ['checkpoints', name],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const page = await call('ListCheckpoints', { TrainingJobName: name, MaxResults: 1000, NextToken }, signal)
        return { items: page.Checkpoints ?? [], next: page.NextToken }
      }),
    refetchInterval: SLOW_MS,
  })

/** A new revision has another key: it is asked for at once. */
export const revisionsQuery = (name: string, revision: number) =>
  queryOptions({
    queryKey: ['revisions', name, revision],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const asked = { TrainingJobName: name, MaxResults: 1000, NextToken }
        const page = await call('ListTrainingJobRevisions', asked, signal)
        return { items: page.Revisions ?? [], next: page.NextToken }
      }),
    staleTime: SLOW_MS,
  })

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

const REPORT_MS = 60_000

/** A report. `span` computes the time range anew for each request, so that a range up to now stays current. */
export const reportQuery = (key: readonly string[], span: () => Operations['GetReport']['request']) =>
  queryOptions({
    queryKey: ['report', ...key],
    queryFn: ({ signal }) => call('GetReport', span(), signal),
    refetchInterval: REPORT_MS,
    placeholderData: keepPreviousData,
  })

/** Limit of output files that a page shows. */
export const MOST_OUTPUTS = 5_000

export const outputsQuery = (name: string) =>
  queryOptions({
    queryKey: ['outputs', name],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const page = await call('ListOutputs', { TrainingJobName: name, MaxResults: 1000, NextToken }, signal)
        return { items: page.Outputs ?? [], next: page.NextToken }
      }, MOST_OUTPUTS),
    refetchInterval: SLOW_MS,
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
