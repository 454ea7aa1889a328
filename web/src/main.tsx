import './mantine.css'
import './styles/tokens.css'
import './styles/base.css'
import './styles/shell.css'
import './styles/parts.css'
import './styles/pages.css'

import { createTheme, MantineProvider } from '@mantine/core'
import { QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { setNonce } from 'get-nonce'
import { StrictMode, Suspense } from 'react'
import { createRoot } from 'react-dom/client'
import { createBrowserRouter, useRouteError } from 'react-router'
import { RouterProvider } from 'react-router/dom'

import { ApiError, contact } from './api/client'
import { loadAhead, lazyPart } from './api/pages'
import { Empty, Loading, Problem } from './parts/Basics'
import { Shell } from './parts/Shell'
import { SHELL } from './words/shell'

const OverviewPage = lazyPart(() => import('./pages/Overview'))
const JobsPage = lazyPart(() => import('./pages/Jobs'))
const JobPage = lazyPart(() => import('./pages/Job'))
const IncidentsPage = lazyPart(() => import('./pages/Incidents'))
const IncidentPage = lazyPart(() => import('./pages/Incident'))
const QueuePage = lazyPart(() => import('./pages/Queue'))
const FleetsPage = lazyPart(() => import('./pages/Fleets'))
const FleetPage = lazyPart(() => import('./pages/Fleet'))
const ReportsPage = lazyPart(() => import('./pages/Reports'))
const DrillsPage = lazyPart(() => import('./pages/Drills'))
const SubmitPage = lazyPart(() => import('./pages/Submit'))
const SettingsPage = lazyPart(() => import('./pages/Settings'))
const SignInPage = lazyPart(() => import('./pages/SignIn'))

const client = new QueryClient({
  defaultOptions: {
    queries: {
      retry: (failures, error) => failures < 2 && error instanceof ApiError && error.isPassing,
      refetchOnWindowFocus: true,
      refetchIntervalInBackground: false,
      staleTime: 1_000,
      gcTime: 300_000,
    },
    mutations: { networkMode: 'always' }, // a browser without internet may reach a local control plane
  },
})

// If the server refuses the session for any request, request the session again. `Shell` then opens the sign-in page.
contact.signedOut = () => void client.invalidateQueries({ queryKey: ['session'] })

function Broken() {
  return (
    <main>
      <Problem error={useRouteError()} title={SHELL.broken} retry={() => window.location.reload()} />
    </main>
  )
}

function NotFound() {
  return (
    <div className="stack">
      <h1>{SHELL.notFound.title}</h1>
      <Empty title={SHELL.notFound.empty} text={SHELL.notFound.text} />
    </div>
  )
}

const page = (element: React.ReactNode) => <Suspense fallback={<Loading />}>{element}</Suspense>
const router = createBrowserRouter([
  { path: '/sign-in', element: page(<SignInPage />), errorElement: <Broken /> },
  {
    element: <Shell />,
    errorElement: <Broken />,
    children: [
      { index: true, element: page(<OverviewPage />) },
      { path: 'jobs', element: page(<JobsPage />) },
      { path: 'jobs/:name/:tab?', element: page(<JobPage />) },
      { path: 'incidents', element: page(<IncidentsPage />) },
      { path: 'incidents/:id', element: page(<IncidentPage />) },
      { path: 'queue', element: page(<QueuePage />) },
      { path: 'fleets', element: page(<FleetsPage />) },
      { path: 'fleets/:name', element: page(<FleetPage />) },
      { path: 'reports', element: page(<ReportsPage />) },
      { path: 'drills', element: page(<DrillsPage />) },
      { path: 'submit', element: page(<SubmitPage />) },
      { path: 'settings', element: page(<SettingsPage />) },
      { path: '*', element: <NotFound /> },
    ],
  },
])

const nonce = document.querySelector<HTMLMetaElement>('meta[name="csp-nonce"]')?.content ?? ''
setNonce(nonce) // Mantine's dialogs insert a style that keeps the page behind them in place
const theme = createTheme({
  primaryColor: 'blue',
  primaryShade: 8,
  autoContrast: true,
  fontFamily: 'var(--font)',
  fontFamilyMonospace: 'var(--font-mono)',
  headings: { fontFamily: 'var(--font)' },
  fontSizes: { xs: 'var(--t-1)', sm: 'var(--t-2)', md: 'var(--t-3)', lg: 'var(--t-4)', xl: 'var(--t-5)' },
  respectReducedMotion: true,
  components: { NumberInput: { defaultProps: { hideControls: true } } }, // its buttons are too small for a finger
})

createRoot(document.getElementById('root')!).render(
  <StrictMode>
    <MantineProvider theme={theme} defaultColorScheme="auto" getStyleNonce={() => nonce}>
      <QueryClientProvider client={client}>
        <RouterProvider router={router} />
      </QueryClientProvider>
    </MantineProvider>
  </StrictMode>,
)
const AHEAD_MS = 3_000 // delays the code of other pages, so that it does not slow the requested page's first load
setTimeout(() => void loadAhead(), AHEAD_MS)
