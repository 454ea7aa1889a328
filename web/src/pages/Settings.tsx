/** Who is signed in, how it looks, which versions run. */
import { SegmentedControl, useMantineColorScheme } from '@mantine/core'
import { useDocumentTitle } from '@mantine/hooks'
import { useQuery } from '@tanstack/react-query'

import { nodesQuery, sessionQuery, useRole } from '../api/queries'
import { ago, utc } from '../model/format'
import { versionsOf } from '../model/nodes'
import { FactList, Shown, useTold } from '../parts/Basics'
import { NotificationSettings } from '../parts/NotificationSettings'
import { Tokens } from '../parts/Tokens'

const MAY: Record<string, string> = { admin: 'everything, in every project', submitter: 'run and stop jobs of its project; read fleets', viewer: 'read' }
const KEYS = [['⌘K or Ctrl K', 'search and go to'], ['g then j, q, i, f, s, d', 'jobs, queue, incidents, fleets, submit, drills'], ['/', 'filter']]

export default function SettingsPage() {
  useDocumentTitle('Settings, Everstep')
  const query = useQuery(sessionQuery)
  const ends = useTold((now) => (query.data ? ago(query.data.ExpiresAt, now) : ''))
  const { isAdmin } = useRole()
  const nodes = useQuery(nodesQuery()).data
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  return (
    <div className="stack">
      <h1>Settings</h1>
      <section className="card">
        <h2>Session</h2>
        <Shown query={query} rows={2}>
          {(session) => session && (
            <FactList
              facts={[
                ['Role', `${session.Role}: may ${MAY[session.Role] ?? 'what the server allows'}`],
                ['Project', session.Project || 'all'],
                ['Token', <span key="token"><code>{session.TokenId}</code> {session.Description}</span>],
                ['Session ends', `${ends}, ${utc(session.ExpiresAt)}`],
                ['Server', `Everstep ${session.Version}`],
                ['Agents', nodes === undefined ? '…' : versionsOf(nodes)],
              ]}
            />
          )}
        </Shown>
      </section>
      {isAdmin && query.data && <Tokens own={query.data.TokenId} />}
      <NotificationSettings />
      <section className="card">
        <h2>Theme</h2>
        <SegmentedControl aria-label="Theme" value={colorScheme} onChange={(value) => setColorScheme(value as 'auto')} data={[{ value: 'auto', label: 'As the system' }, { value: 'light', label: 'Light' }, { value: 'dark', label: 'Dark' }]} />
      </section>
      <section className="card">
        <h2>Keys</h2>
        <FactList facts={KEYS.map(([key, what]) => [key!, what])} />
      </section>
    </div>
  )
}
