/** One recorded moment of a simulated fleet: its answers replace the server, and the real pages render them. */
import { MantineProvider } from '@mantine/core'
import { focusManager, QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { act, cleanup, render } from '@testing-library/react'
import { Suspense, type ReactNode } from 'react'
import { MemoryRouter, Route, Routes } from 'react-router'
import { vi } from 'vitest'

import { clock, contact } from '../../src/api/client'
import type { Event, GetLogEventsResponse, Incident, Node, TrainingJobSummary } from '../../src/contract'
import DrillsPage from '../../src/pages/Drills'
import FleetPage from '../../src/pages/Fleet'
import FleetsPage from '../../src/pages/Fleets'
import IncidentPage from '../../src/pages/Incident'
import IncidentsPage from '../../src/pages/Incidents'
import JobPage from '../../src/pages/Job'
import JobsPage from '../../src/pages/Jobs'
import OverviewPage from '../../src/pages/Overview'
import QueuePage from '../../src/pages/Queue'
import ReportsPage from '../../src/pages/Reports'
import { Shell } from '../../src/parts/Shell'
import '../drawn'

// jsdom has no canvas. Tests of Chromium cover the drawing; the text of a chart is outside its plot.
vi.mock(import('../../src/charts/Plot'), async (original) => ({ ...(await original()), Plot: () => <></> }))
// jsdom has no layout. The list of log lines draws the lines that fit into this many pixels.
for (const side of ['clientWidth', 'clientHeight']) {
  Object.defineProperty(Element.prototype, side, { configurable: true, get: () => 100_000 })
}

/** One moment as `tests/dashboard/random_story.py` records it. */
export interface Moment {
  seed: number
  number: number
  /** Server time in Unix seconds. */
  now: number
  acts: string[]
  /** Answers by `GET /path`. Lists contain all entries. */
  answers: Record<string, unknown>
}

export interface Listed {
  jobs: TrainingJobSummary[]
  incidents: Incident[]
  nodes: Node[]
  events: Event[]
}

export const listed = ({ answers }: Moment): Listed => ({
  jobs: (answers['GET /v1/training-jobs'] as { TrainingJobSummaries: TrainingJobSummary[] }).TrainingJobSummaries,
  incidents: (answers['GET /v1/incidents'] as { Incidents: Incident[] }).Incidents,
  nodes: (answers['GET /v1/nodes'] as { Nodes: Node[] }).Nodes,
  events: (answers['GET /v1/events'] as { Events: Event[] }).Events,
})

/** The answer to a request, with the filters of its query applied. Undefined: the moment has no such answer. */
export function answerOf(moment: Moment, url: string): unknown {
  const { pathname, searchParams: query } = new URL(url, 'http://server')
  const { jobs, incidents, nodes, events } = listed(moment)
  const is = (wanted: string | null, ...values: (string | undefined)[]) => wanted === null || values.includes(wanted)
  const isDescending = query.get('SortOrder') === 'Descending'
  const most = Number(query.get('MaxResults') ?? 100)
  const job = query.get('TrainingJobName')
  switch (pathname) {
    case '/v1/session':
      return { Role: 'admin', Project: '', TokenId: 't', Description: '', ExpiresAt: 9e9, Time: moment.now }
    case '/v1/incidents': {
      const isOpen = query.get('StatusEquals')
      const found = incidents.filter((each) => is(job, each.TrainingJobName, each.RunId))
      const some = found.filter((each) => isOpen === null || (isOpen === 'Open') === (each.ClosedAt === undefined))
      return { Incidents: isDescending ? some.toReversed() : some }
    }
    case '/v1/events': {
      const [after, before] = ['TimeAfter', 'TimeBefore'].map((name) => query.get(name))
      const named = jobs.filter((each) => is(job, each.TrainingJobName, each.RunId))
      const names = new Set(named.map((each) => each.TrainingJobName))
      const since = Number(query.get('AfterEventId') ?? 0)
      const found = events
        .filter((each) => job === null || names.has(each.TrainingJobName ?? ''))
        .filter((each) => is(query.get('FleetName'), each.FleetName) && each.EventId > since)
        .filter((each) => (after ? each.Time >= Number(after) : true) && (before ? each.Time <= Number(before) : true))
      return { Events: (isDescending ? found : found.toReversed()).slice(0, most) } // recorded newest first
    }
    case '/v1/nodes': {
      const withEnded = query.get('IncludeEnded') === 'true'
      const found = nodes.filter((each) => is(query.get('FleetName'), each.FleetName))
      return { Nodes: found.filter((each) => withEnded || each.NodeStatus !== 'gone') }
    }
  }
  const [, name = '', rest = ''] = /^\/v1\/training-jobs\/([^/]+)(.*)$/.exec(pathname) ?? []
  const wanted = decodeURIComponent(name)
  const named = jobs.find((each) => each.RunId === wanted)?.TrainingJobName ?? wanted
  const stored = moment.answers[`GET /v1/training-jobs/${named}${rest}`]
  if (rest === '/logs/events') return logPage(stored as GetLogEventsResponse, query)
  if (name) return stored
  const [, nodeId] = /^\/v1\/nodes\/([^/]+)$/.exec(pathname) ?? []
  if (nodeId) return nodes.find((each) => each.NodeId === nodeId)
  return moment.answers[`GET ${pathname}`]
}

/** Return the page of a log that a request wants. The stored answer contains the whole log, the oldest line first. */
function logPage(whole: GetLogEventsResponse, query: URLSearchParams): GetLogEventsResponse {
  const [start, end, launch] = ['StartTime', 'EndTime', 'Generation'].map((name) => query.get(name))
  const isHeld = query.get('NextToken') !== null
  const found = (whole.Events ?? [])
    .filter((each) => start === null || each.Timestamp >= Number(start))
    .filter((each) => end === null || each.Timestamp < Number(end))
    .filter((each) => launch === null || each.Generation === Number(launch))
  const most = Number(query.get('Limit') ?? 1000)
  const some = query.get('StartFromHead') === 'true' ? found.slice(0, most) : found.slice(-most)
  const token = query.get('NextToken') ?? 'end'
  return { ...whole, Events: isHeld ? [] : some, NextForwardToken: token, NextBackwardToken: token }
}

/** Paths of requests for which the moments have no answer. The tests report them in a warning. */
export const unanswered = new Set<string>()

function serve(moment: Moment): void {
  vi.stubGlobal('fetch', (url: string) => {
    // The stream of new log lines stays open and is empty.
    if (url.includes('/logs/follow')) return Promise.resolve(new Response(new ReadableStream()))
    const answer = answerOf(moment, url)
    if (answer === undefined) unanswered.add(url.split('?')[0]!)
    const body = answer ?? { Code: 'ResourceNotFoundException', Message: 'This moment has no such answer.' }
    return Promise.resolve(new Response(JSON.stringify(body), { status: answer === undefined ? 404 : 200 }))
  })
}

/** jsdom has no event stream. This one never connects. */
window.EventSource ??= class {
  close() {}
  addEventListener() {}
} as unknown as typeof EventSource

const PAGES = (
  <>
    <Route index element={<OverviewPage />} />
    <Route path="jobs" element={<JobsPage />} />
    <Route path="jobs/:name/:tab?" element={<JobPage />} />
    <Route path="incidents" element={<IncidentsPage />} />
    <Route path="incidents/:id" element={<IncidentPage />} />
    <Route path="queue" element={<QueuePage />} />
    <Route path="fleets" element={<FleetsPage />} />
    <Route path="fleets/:name" element={<FleetPage />} />
    <Route path="drills" element={<DrillsPage />} />
    <Route path="reports" element={<ReportsPage />} />
  </>
)
const ROUTES = <Routes>{PAGES}</Routes>
const FRAMED = (
  <Routes>
    <Route element={<Shell />}>{PAGES}</Route>
  </Routes>
)
const JOB_TABS = ['', '/metrics', '/logs', '/protection', '/checkpoints', '/events', '/spec']
/** Only the newest incidents of a long story have pages of their own. */
const MOST_INCIDENTS = 3

/** Addresses of every page about this moment. */
export function pagesOf(moment: Moment): string[] {
  const { jobs, incidents } = listed(moment)
  const fleets = (moment.answers['GET /v1/fleets'] as { Fleets: { FleetName: string }[] }).Fleets
  return [
    '/',
    '/jobs',
    '/incidents',
    '/queue',
    '/fleets',
    '/drills',
    '/reports',
    ...fleets.map((each) => `/fleets/${each.FleetName}?ended=1`),
    ...jobs.flatMap((each) => JOB_TABS.map((tab) => `/jobs/${each.TrainingJobName}${tab}`)),
    ...incidents.slice(-MOST_INCIDENTS).map((each) => `/incidents/${each.IncidentId}`),
  ]
}

/**
 * Render pages one after another, as one browser that navigates.
 *
 * `staleSeconds`: how long ago the server last answered. `look` receives the page at each address.
 */
export async function render_pages(
  moment: Moment,
  addresses: string[],
  look: (page: HTMLElement, address: string) => void,
  staleSeconds = 0,
): Promise<void> {
  vi.setSystemTime(moment.now * 1000)
  focusManager.setFocused(false) // hidden pages do not poll: a moment's answers do not change
  clock.offset = 0
  serve(moment)
  const client = new QueryClient({
    defaultOptions: { queries: { retry: false, staleTime: Infinity, gcTime: Infinity } },
  })
  for (const address of addresses) {
    contact.at = Date.now()
    const { container } = render(frame(client, address))
    await settled(client)
    if (staleSeconds) {
      cleanup()
      contact.at = Date.now() - staleSeconds * 1000
      const { container: stale } = render(frame(client, address, FRAMED))
      look(stale, address)
    } else look(container, address)
    cleanup()
  }
  client.clear()
  vi.unstubAllGlobals()
}

const frame = (client: QueryClient, address: string, routes = ROUTES): ReactNode => (
  <MantineProvider env="test">
    <QueryClientProvider client={client}>
      <MemoryRouter initialEntries={[address]}>
        <Suspense fallback={null}>{routes}</Suspense>
      </MemoryRouter>
    </QueryClientProvider>
  </MantineProvider>
)

/** Wait until no request and no part of the application is loading. */
async function settled(client: QueryClient): Promise<void> {
  for (let quiet = 0; quiet < 4;) {
    await act(async () => {
      await new Promise((resolve) => setTimeout(resolve, 0)) // queries notify their components by such a timer
    })
    const isLoading = client.isFetching() > 0 || document.querySelector('[aria-busy=true]') !== null
    quiet = isLoading ? 0 : quiet + 1
  }
}
