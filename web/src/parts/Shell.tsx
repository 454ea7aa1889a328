/** The frame around every page: the navigation, whether the page's data is current, and the session. */
import { Button } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { useEffect, useLayoutEffect, useState } from 'react'
import { Link, NavLink, Outlet, useLocation, useNavigate } from 'react-router'

import { contact, serverTime, session } from '../api/client'
import { useLive, type Liveness } from '../api/live'
import { openIncidentsQuery, sessionQuery } from '../api/queries'
import { lazyWith } from '../api/pages'
import { clock } from '../model/format'
import { PLACES, SUBMIT } from '../model/places'
import { SHELL } from '../words/shell'
import { Icon, Loading, Problem, Status, useIsStale } from './Basics'
import { isNotifying, useWatching } from './watching'
import { moveRowFocus } from './rowFocus'

// Few visits open these parts, so they load when they are opened.
const Palette = lazyWith(() => import('./Palette'))
const Notifier = lazyWith(() => import('./Notifier'))
const AccountMenu = lazyWith(
  () => import('./AccountMenu'),
  ({ children }) => children,
)
const KeyHelp = lazyWith(() => import('./KeyHelp'))

/** Whether the server answers, and whether its events arrive. */
function Freshness({ liveness }: { liveness: Liveness }) {
  if (useIsStale()) return <Status tone="idle" {...SHELL.stale} />
  if (liveness === 'connecting') return null
  return liveness === 'cut' ? <Status tone="warn" {...SHELL.cut} /> : <Status tone="good" {...SHELL.live} />
}

/** The second key of a pair such as `g j` follows within this time. */
const GO_MS = 1500
const KEYS: Readonly<Record<string, string>> = Object.fromEntries([...PLACES, SUBMIT].map(({ key, to }) => [key, to]))

const isTyping = (target: HTMLElement): boolean =>
  (/^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName) && !/^(checkbox|radio)$/.test((target as HTMLInputElement).type)) ||
  target.isContentEditable

export function Shell() {
  const signedIn = useQuery(sessionQuery)
  const location = useLocation()
  const navigate = useNavigate()
  const client = useQueryClient()
  /** The text of the search box, and whether Enter waits for results. undefined: the search box is closed. */
  const [search, setSearch] = useState<{ text: string; isEntered: boolean }>()
  const type = (text: string) => setSearch({ text, isEntered: false })
  const enter = () => setSearch((before) => ({ text: before?.text ?? '', isEntered: true }))
  const isSearching = search !== undefined
  const [isHelpOpen, setHelpOpen] = useState(false)
  const [isAccountOpen, setAccountOpen] = useState(false)
  const isSignedOut = signedIn.data === null
  const ending = useMutation({
    // Cancel requests for the session, because a late answer would show the page again.
    onMutate: () => client.cancelQueries({ queryKey: sessionQuery.queryKey }),
    mutationFn: session.signOut,
    onSuccess: () => {
      client.removeQueries({ predicate: ({ queryKey }) => queryKey[0] !== sessionQuery.queryKey[0] })
      client.setQueryData(sessionQuery.queryKey, null)
    },
  })
  /** The page disappears before its session ends, so that it sends no request without a session. */
  const isShown = Boolean(signedIn.data) && !ending.isPending
  const liveness = useLive(client, isShown)
  const isStale = useIsStale()
  const watching = useWatching()

  useEffect(() => {
    const here = location.pathname + location.search + location.hash
    if (isSignedOut) void navigate(`/sign-in?next=${encodeURIComponent(here)}`, { replace: true })
  }, [isSignedOut, location, navigate])

  // Add the listener before the first paint, because a person may press a key as soon as the page is visible.
  useLayoutEffect(() => {
    let goPressedAt = 0
    const listen = (event: KeyboardEvent) => {
      if ((event.metaKey || event.ctrlKey) && event.key.toLowerCase() === 'k') {
        event.preventDefault()
        type('')
        return
      }
      const target = event.target as HTMLElement
      if (event.metaKey || event.ctrlKey || event.altKey || isTyping(target)) return
      if (isSearching) {
        // The search box may still load, or may not have the focus. Keys typed meanwhile go into it.
        if (event.key.length === 1 && !(event.key === ' ' && target.tagName === 'BUTTON')) {
          event.preventDefault()
          setSearch((before) => ({ text: `${before?.text ?? ''}${event.key}`, isEntered: false }))
        } else if (event.key === 'Enter') {
          event.preventDefault() // the focused link must not open
          enter()
        }
        return
      }
      if (target.closest('[role="dialog"], [role="menu"]')) return
      const to = KEYS[event.key]
      const isGoing = Date.now() - goPressedAt < GO_MS
      if (event.key === 'g') goPressedAt = Date.now()
      else if (to && isGoing) void navigate(to)
      else if (event.key === '?') setHelpOpen(true)
      else if (event.key === 'j' || event.key === 'k') moveRowFocus(event.key === 'j' ? 1 : -1)
      else if (event.key === '/') {
        const filter = document.querySelector<HTMLInputElement>('[data-filter]')
        if (filter) {
          event.preventDefault()
          filter.focus()
        }
      }
    }
    window.addEventListener('keydown', listen)
    return () => window.removeEventListener('keydown', listen)
  }, [navigate, isSearching])

  if (isSignedOut) return null
  const role = signedIn.data?.Role ?? '…'
  const account = (
    <Button
      variant="default"
      size="xs"
      aria-label={SHELL.account(role)}
      aria-haspopup="menu"
      aria-expanded={isAccountOpen}
      onClick={() => setAccountOpen(!isAccountOpen)}
    >
      {role}
    </Button>
  )
  const places = signedIn.data?.Role === 'viewer' ? PLACES : [...PLACES, SUBMIT]
  return (
    <div className={`app${isStale ? ' is-stale' : ''}`}>
      <a className="skip" href="#main">
        {SHELL.skip}
      </a>
      <header className="sidebar">
        <Link to="/" className="brand">
          <img src="/favicon.svg" width="22" height="22" alt="" />
          <span>Everstep</span>
        </Link>
        <button type="button" className="find" onClick={() => type('')}>
          <span>{SHELL.search}</span> <kbd>⌘K</kbd>
        </button>
        <nav aria-label={SHELL.navigation}>
          {places.map(({ name, to, path }) => (
            <NavLink key={name} to={to} end={to === '/'}>
              <Icon path={path} />
              <span>{SHELL.places[name]}</span>
              {name === 'incidents' && isShown && <OpenIncidents />}
            </NavLink>
          ))}
        </nav>
        <div className="foot">
          <Freshness liveness={liveness} />
          {isAccountOpen ? (
            <AccountMenu onClose={() => setAccountOpen(false)} onSignOut={() => ending.mutate()}>
              {account}
            </AccountMenu>
          ) : (
            account
          )}
        </div>
      </header>
      <main id="main" tabIndex={-1}>
        <div className="page">
          {isStale && (
            <p className="outage" role="status">
              {SHELL.outage(clock(serverTime(contact.at)))}
            </p>
          )}
          {ending.error && <Problem error={ending.error} title={SHELL.notSignedOut} retry={() => ending.mutate()} />}
          {isShown && isNotifying(watching) && <Notifier runIds={watching.runIds} />}
          {isShown && <Outlet />}
          {!isShown && signedIn.error && <Problem error={signedIn.error} retry={() => void signedIn.refetch()} />}
          {!isShown && !signedIn.error && <Loading />}
        </div>
      </main>
      {search !== undefined && (
        <Palette
          {...search}
          onType={type}
          onEnter={enter}
          onClose={() => setSearch(undefined)}
          onShowKeys={() => {
            setSearch(undefined)
            setHelpOpen(true)
          }}
          onSignOut={() => ending.mutate()}
        />
      )}
      {isHelpOpen && <KeyHelp onClose={() => setHelpOpen(false)} />}
    </div>
  )
}

/** The number of open incidents, beside the link to the incidents in the navigation. */
function OpenIncidents() {
  const open = useQuery(openIncidentsQuery).data?.length ?? 0
  return open ? (
    <span className="count tone-idle" title={SHELL.openIncidentsNote}>
      {SHELL.openIncidents(open)}
    </span>
  ) : null
}
