/** The frame around every page: where one can go, how fresh the page is, who is signed in. */
import { Button } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { Suspense, useEffect, useLayoutEffect, useState } from 'react'
import { Link, NavLink, Outlet, useLocation, useNavigate } from 'react-router'

import { session } from '../api/client'
import { useLive, type Liveness } from '../api/live'
import { openIncidentsQuery, sessionQuery } from '../api/queries'
import { part } from '../api/pages'
import { duration } from '../model/format'
import { STALE_SECONDS } from '../model/figures'
import { Loading, Problem, Status, useStaleSeconds } from './Basics'

// What few visits open is loaded when it is opened.
const Palette = part(() => import('./Palette'))
const AccountMenu = part(() => import('./AccountMenu'))

function Freshness({ liveness }: { liveness: Liveness }) {
  const stale = useStaleSeconds()
  if (stale > STALE_SECONDS) return <Status tone="bad" word={`Stale, ${duration(stale)}`} title="The control plane has not answered for this long" />
  if (liveness === 'connecting') return null
  if (liveness === 'cut') return <Status tone="warn" word="No events" title="The stream of events is cut off; everything is asked for every 2 s until it is back" />
  return <Status tone="good" word="Live" title="Events come as they happen" />
}

const KEYS: Record<string, string> = { j: '/', q: '/queue', i: '/incidents', f: '/fleets', s: '/submit', d: '/drills' }

export function Shell() {
  const signedIn = useQuery(sessionQuery)
  const location = useLocation()
  const navigate = useNavigate()
  const client = useQueryClient()
  /** What is typed into the palette, and whether Enter was pressed on it and is not over; undefined: it is closed. */
  const [sought, setSought] = useState<{ text: string; isEntered: boolean }>()
  const type = (text: string) => setSought({ text, isEntered: false })
  const enter = () => setSought((before) => ({ text: before?.text ?? '', isEntered: true }))
  const isSearching = sought !== undefined
  const [isAccountOpen, setAccountOpen] = useState(false)
  const isSignedOut = signedIn.data === null
  const ending = useMutation({
    onMutate: () => client.cancelQueries({ queryKey: sessionQuery.queryKey }), // an answer from before would show the page again
    mutationFn: session.signOut,
    onSuccess: () => {
      client.removeQueries({ predicate: ({ queryKey }) => queryKey[0] !== sessionQuery.queryKey[0] })
      client.setQueryData(sessionQuery.queryKey, null)
    },
  })
  /** The page goes before its session does, so that nothing asks for what it may not see any more. */
  const isShown = Boolean(signedIn.data) && !ending.isPending
  const liveness = useLive(client, isShown)

  useEffect(() => {
    if (isSignedOut) void navigate(`/sign-in?next=${encodeURIComponent(location.pathname + location.search + location.hash)}`, { replace: true })
  }, [isSignedOut, location, navigate])

  // Before anything is painted: whoever sees the page may type.
  useLayoutEffect(() => {
    let gone = 0
    const listen = (event: KeyboardEvent) => {
      if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === 'k') {
        event.preventDefault()
        type('')
        return
      }
      const target = event.target as HTMLElement
      if (event.metaKey || event.ctrlKey || event.altKey || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) || target.isContentEditable) return
      if (isSearching) {
        // Typed before the palette is there, or has the focus: nothing that somebody types at 3 a.m. is lost.
        if (event.key.length === 1 && !(event.key === ' ' && target.tagName === 'BUTTON')) {
          event.preventDefault()
          setSought((before) => ({ text: `${before?.text ?? ''}${event.key}`, isEntered: false }))
        } else if (event.key === 'Enter') {
          event.preventDefault() // not for the link that still has the focus
          enter()
        }
        return
      }
      const to = KEYS[event.key]
      if (event.key === 'g') gone = Date.now()
      else if (event.key === '/') {
        const filter = document.querySelector<HTMLInputElement>('[data-filter]')
        if (filter) {
          event.preventDefault()
          filter.focus()
        }
      } else if (to && Date.now() - gone < 1500) void navigate(to)
    }
    window.addEventListener('keydown', listen)
    return () => window.removeEventListener('keydown', listen)
  }, [navigate, isSearching])

  if (isSignedOut) return null
  const account = (
    <Button variant="default" size="xs" aria-label={`${signedIn.data?.Role ?? '…'}: account and theme`} aria-haspopup="menu" aria-expanded={isAccountOpen} onClick={() => setAccountOpen(!isAccountOpen)}>
      {signedIn.data?.Role ?? '…'}
    </Button>
  )
  return (
    <>
      <a className="skip" href="#main">
        Skip to the content
      </a>
      <header className="top">
        <Link to="/" className="brand">
          <img src="/favicon.svg" width="22" height="22" alt="" />
          <span>Everstep</span>
        </Link>
        <nav aria-label="Main">
          <NavLink to="/" end className={({ isActive }) => (isActive || location.pathname.startsWith('/jobs') ? 'active' : '')}>
            Jobs
          </NavLink>
          <NavLink to="/queue">Queue</NavLink>
          <NavLink to="/incidents">
            Incidents
            {isShown && <OpenIncidents />}
          </NavLink>
          <NavLink to="/fleets">Fleets</NavLink>
          <NavLink to="/drills">Drills</NavLink>
          {signedIn.data?.Role !== 'viewer' && <NavLink to="/submit">Submit</NavLink>}
        </nav>
        <div className="row tools">
          <Freshness liveness={liveness} />
          <Button variant="default" size="xs" onClick={() => type('')}>
            Search <kbd>⌘K</kbd>
          </Button>
          {isAccountOpen ? (
            <Suspense fallback={account}>
              <AccountMenu onClose={() => setAccountOpen(false)} onSignOut={() => ending.mutate()}>{account}</AccountMenu>
            </Suspense>
          ) : (
            account
          )}
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        {ending.error && <Problem error={ending.error} title="Not signed out" retry={() => ending.mutate()} />}
        {isShown ? <Outlet /> : signedIn.error ? <Problem error={signedIn.error} retry={() => void signedIn.refetch()} /> : <Loading />}
      </main>
      {sought !== undefined && (
        <Suspense fallback={null}>
          <Palette typed={sought.text} isEntered={sought.isEntered} onType={type} onEnter={enter} onClose={() => setSought(undefined)} />
        </Suspense>
      )}
    </>
  )
}

function OpenIncidents() {
  const open = useQuery(openIncidentsQuery).data?.length ?? 0
  return open ? <span className="count tone-warn" aria-label={`${open} open`}>{open}</span> : null
}
