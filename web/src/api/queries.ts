/** The queries of the pages: their requests, keys and poll intervals. Events renew queries at once (`live.ts`). */
import { keepPreviousData, queryOptions, useQuery, type QueryClient } from '@tanstack/react-query'

import { operations, type Event, type Incident, type Operations, type TrainingJobSummary } from '../contract'
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
/** Number of items per request. Requests for jobs, incidents and events begin with the newest. */
const PAGE = 1_000
/** Maximum number of incidents that the pages of one job request. */
const MOST_OF_JOB = 5_000
/** Maximum number of nodes that a page requests. No more agents are expected to connect to one control plane. */
const MOST_NODES = 10_000

/** Query of one object. */
const describedQuery = <O extends Operation>(
  queryKey: readonly string[],
  operation: O,
  request: Operations[O]['request'],
  refetchInterval: () => number = told,
) => queryOptions({ queryKey, queryFn: ({ signal }) => call(operation, request, signal), refetchInterval })

type Paged = { [O in Operation]: 'NextToken' extends keyof Operations[O]['response'] ? O : never }[Operation]
interface ListOptions {
  /** After this number of items, no further page is requested. */
  limit?: number
  refetchInterval?: number | false
  staleTime?: number
}

/** Query of all pages of a list. `items` returns the items of a page. */
const listQuery = <O extends Paged, T>(
  queryKey: readonly unknown[],
  operation: O,
  request: Operations[O]['request'],
  items: (page: Operations[O]['response']) => T[] | undefined,
  { limit, ...options }: ListOptions = {},
) =>
  queryOptions({
    queryKey,
    queryFn: ({ signal }) =>
      all(async (NextToken) => {
        const page = await call(operation, { MaxResults: PAGE, ...request, NextToken }, signal)
        return { items: items(page) ?? [], next: page.NextToken }
      }, limit),
    refetchInterval: told,
    ...options,
  })

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
  describedQuery(['job', name], 'DescribeTrainingJob', { TrainingJobName: name }, steps)

export const protectionQuery = (name: string) =>
  describedQuery(['protection', name], 'DescribeProtection', { TrainingJobName: name }, steps)

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

export const incidentQuery = (id: string) => describedQuery(['incident', id], 'DescribeIncident', { IncidentId: id })

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

export const fleetsQuery = listQuery(['fleets'], 'ListFleets', {}, (page) => page.Fleets)

/** Query of the jobs and fleets that need a person, the most urgent first. */
export const dutiesQuery = queryOptions({
  queryKey: ['jobs', 'duties'],
  queryFn: async ({ signal }) => (await call('DescribeDuties', {}, signal)).Duties ?? [],
  refetchInterval: told,
})

/** Query of the nodes of one fleet, or of all fleets. `ended`: include nodes that have ended. */
export const nodesQuery = (fleet?: string, ended = false) => {
  const request = { FleetName: fleet, IncludeEnded: ended }
  return listQuery(['nodes', fleet ?? '', ended], 'ListNodes', request, (page) => page.Nodes, { limit: MOST_NODES })
}

/** Query of one node. A link may lead to a node that has ended and is missing in the list of living nodes. */
export const nodeQuery = (id: string) => describedQuery(['nodes', 'one', id], 'DescribeNode', { NodeId: id })

/** Query of the nodes that worked for a job, and of the times when they did. */
export const jobNodesQuery = (name: string) =>
  listQuery(['job', name, 'nodes'], 'ListTrainingJobNodes', { TrainingJobName: name }, (page) => page.Nodes)

/** Query of what a job did in each second of its life. */
export const timeSpansQuery = (name: string) =>
  listQuery(['job', name, 'spans'], 'ListTimeSpans', { TrainingJobName: name }, (page) => page.TimeSpans)

/** Query of a job's checkpoints, or of those in its trash. */
export const checkpointsQuery = (name: string, isTrash = false) => {
  const key = isTrash ? ['checkpoints', name, 'trash'] : ['checkpoints', name]
  const request = { TrainingJobName: name, Trashed: isTrash || undefined }
  return listQuery(key, 'ListCheckpoints', request, (page) => page.Checkpoints, { refetchInterval: SLOW_MS })
}

/** Query of a job's revisions. The key contains the newest revision, so a new revision causes a request at once. */
export const revisionsQuery = (name: string, revision: number) => {
  const options = { refetchInterval: false, staleTime: SLOW_MS } as const
  const request = { TrainingJobName: name }
  const key = ['revisions', name, revision]
  return listQuery(key, 'ListTrainingJobRevisions', request, (page) => page.Revisions, options)
}

/** Query of all drills, in the order in which people requested them. */
export const drillsQuery = listQuery(['drills'], 'ListDrills', {}, (page) => page.Drills)

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
  listQuery(['outputs', name], 'ListOutputs', { TrainingJobName: name }, (page) => page.Outputs, {
    limit: MOST_OUTPUTS,
    refetchInterval: SLOW_MS,
  })

export const tokensQuery = (ended: boolean) =>
  listQuery(['tokens', ended], 'ListTokens', { IncludeEnded: ended }, (page) => page.Tokens, { refetchInterval: false })

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
