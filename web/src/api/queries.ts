/** The queries of the pages: their requests, keys and poll intervals. Events renew queries at once (`live.ts`). */
import { keepPreviousData, queryOptions, useQuery, type QueryClient } from '@tanstack/react-query'

import { operations, type Drill, type Event, type Incident, type Operations, type Token } from '../contract'
import type { TrainingJobSummary } from '../contract'
import { merged, newestFirst, START } from '../model/changes'
import { all, call, session, type Operation } from './client'
import { stream } from './live'

const FAST_MS = 2_000
const SLOW_MS = 10_000
/** Poll interval of data that the event stream keeps current. It is short only while the stream is interrupted. */
const told = () => (stream.isOpen ? SLOW_MS : FAST_MS)
/** Poll interval of a job's description and protection. Their figures change with every step, without an event. */
const STEPS_MS = 4_000
const steps = () => (stream.isOpen ? STEPS_MS : FAST_MS)
/** Number of jobs, incidents or events per request. Requests begin with the newest. */
const PAGE = 1_000
/** Maximum number of incidents that the pages of one job request. */
const MOST_OF_JOB = 5_000
/** Maximum number of nodes that a page requests. No more agents are expected to connect to one control plane. */
const MOST_NODES = 10_000

export const sessionQuery = queryOptions({
  queryKey: ['session'],
  queryFn: ({ signal }) => session.describe(signal),
  refetchInterval: 60_000,
  retry: false,
})

/** One page of the list of jobs. The changes in the last response are applied. `token`: names that response. */
interface JobsPage {
  token: string
  jobs: ReadonlyMap<string, TrainingJobSummary>
}

/** The pages of the list of jobs. They are kept so that a refresh receives only the jobs that changed. */
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

/** Return the newest incidents, sorted from the oldest to the newest. */
const incidents = (
  which: { TrainingJobName?: string; StatusEquals?: 'Open' },
  limit: number,
  signal: AbortSignal,
): Promise<Incident[]> =>
  all(async (NextToken) => {
    const page = await call('ListIncidents', { ...which, SortOrder: 'Descending', MaxResults: PAGE, NextToken }, signal)
    return { items: page.Incidents ?? [], next: page.NextToken }
  }, limit).then((found) => found.toReversed())

/** Query of the incidents of one job, or of the newest incidents of all jobs. */
export const incidentsQuery = (job?: string) =>
  queryOptions({
    queryKey: ['incidents', job ?? ''],
    queryFn: ({ signal }) => incidents({ TrainingJobName: job }, job === undefined ? PAGE : MOST_OF_JOB, signal),
    // Poll often while an incident is open, because no event reports its end.
    refetchInterval: (query) => (query.state.data?.some((each) => each.ClosedAt === undefined) ? FAST_MS : told()),
  })

/** Query of the open incidents of all jobs. */
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

/** Query of the incidents that are similar to an incident, the most similar first. */
export const similarIncidentsQuery = (id: string) =>
  queryOptions({
    queryKey: ['incident', id, 'similar'],
    queryFn: async ({ signal }) => (await call('ListSimilarIncidents', { IncidentId: id }, signal)).Incidents ?? [],
    staleTime: 60_000,
  })

/** Query of the notes of a job, oldest first, without the notes of its incidents. */
export const jobNotesQuery = (name: string) =>
  queryOptions({
    queryKey: ['notes', name],
    queryFn: async ({ signal }) => (await call('ListTrainingJobNotes', { TrainingJobName: name }, signal)).Notes ?? [],
    refetchInterval: SLOW_MS,
  })

const PRINTED_LINES = 20
const AFTER_SECONDS = 1

/** Query of the last log lines of the failed launch, up to `AFTER_SECONDS` after the failure to include a traceback. */
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

/** Query of the newest events, in the order of time. A refresh adds later events, and `olderEvents` earlier ones. */
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
      const now = client.getQueryData<Told>(queryKey) ?? held // `olderEvents` may have added events meanwhile
      return fresh.length ? { ...now, events: [...now.events, ...fresh] } : now
    },
    refetchInterval: told,
  })
}

/** The events that the page has loaded, in the order of time. */
export interface Told {
  events: Event[]
  /** Token for the page of events before `events`. Absent if no earlier events exist. */
  older?: string
}

/** Request the page of events before the loaded events, and add it to them. */
export async function olderEvents(client: QueryClient, scope: Scope): Promise<void> {
  const { queryKey } = eventsQuery(scope)
  const NextToken = client.getQueryData<Told>(queryKey)?.older
  if (NextToken === undefined) return
  const asked = { TrainingJobName: scope.job, FleetName: scope.fleet, MaxResults: PAGE }
  const page = await call('ListEvents', { ...asked, SortOrder: 'Descending', NextToken })
  const older = (page.Events ?? []).toReversed()
  client.setQueryData<Told>(queryKey, (held) =>
    held?.older === NextToken ? { events: [...older, ...held.events], older: page.NextToken } : held,
  )
}

/** Query of a job's events from `seconds` before a failure to `seconds` after the incident's end, or until now. */
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

/** Query of the jobs and fleets that need a person, the most urgent first. */
export const dutiesQuery = queryOptions({
  queryKey: ['jobs', 'duties'],
  queryFn: async ({ signal }) => (await call('DescribeDuties', {}, signal)).Duties ?? [],
  refetchInterval: told,
})

/** Query of the nodes of one fleet, or of all fleets. `ended`: include nodes that have ended. */
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

/** Query of one node. A link may lead to a node that has ended and is missing in the list of living nodes. */
export const nodeQuery = (id: string) =>
  queryOptions({
    queryKey: ['nodes', 'one', id],
    queryFn: ({ signal }) => call('DescribeNode', { NodeId: id }, signal),
    refetchInterval: told,
  })

/** Query of the nodes that worked for a job, and of the times when they did. */
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

/** Query of what a job did in each second of its life. */
export const timeSpansQuery = (name: string) =>
  queryOptions({
    queryKey: ['job', name, 'spans'],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const page = await call('ListTimeSpans', { TrainingJobName: name, MaxResults: 1000, NextToken }, signal)
        return { items: page.TimeSpans ?? [], next: page.NextToken }
      }),
    refetchInterval: told,
  })

/** Query of a job's checkpoints, or of those in its trash. */
export const checkpointsQuery = (name: string, isTrash = false) =>
  queryOptions({
    queryKey: isTrash ? ['checkpoints', name, 'trash'] : ['checkpoints', name],
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const request = { TrainingJobName: name, MaxResults: 1000, NextToken, Trashed: isTrash || undefined }
        const page = await call('ListCheckpoints', request, signal)
        return { items: page.Checkpoints ?? [], next: page.NextToken }
      }),
    refetchInterval: SLOW_MS,
  })

/** Query of a job's revisions. The key contains the newest revision, so a new revision causes a request at once. */
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

/** Query of all drills, in the order in which people requested them. */
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

/** Query of a report. `span` is called for each request, so that a time range that ends now stays current. */
export const reportQuery = (key: readonly string[], span: () => Operations['GetReport']['request']) =>
  queryOptions({
    queryKey: ['report', ...key],
    queryFn: ({ signal }) => call('GetReport', span(), signal),
    refetchInterval: REPORT_MS,
    placeholderData: keepPreviousData,
  })

/** Maximum number of output files that a page shows. */
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

const ROLES = ['none', 'viewer', 'submitter', 'admin']

/**
 * Return the rights of the signed-in user's role. Pages show no button whose request the server would refuse.
 *
 * `may` compares the role with the least role of an operation in the contract. No other code compares roles.
 */
export function useRole(): { may: (operation: Operation) => boolean; mayRun: boolean; isAdmin: boolean } {
  const role = useQuery(sessionQuery).data?.Role ?? 'none'
  const may = (operation: Operation) => ROLES.indexOf(role) >= ROLES.indexOf(operations[operation].role)
  return { may, mayRun: may('CreateTrainingJob'), isAdmin: may('CreateFleet') }
}
