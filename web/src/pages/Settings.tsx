/** The session, API tokens, browser notifications, the theme, and the keyboard shortcuts. */
import { SegmentedControl, useMantineColorScheme } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'

import type { Session } from '../api/client'
import { nodesQuery, sessionQuery, useRole } from '../api/queries'
import { ago, utc } from '../model/format'
import { versionsOf } from '../model/nodes'
import { FactList, Shown, useTimeText } from '../parts/Basics'
import { Card } from '../parts/Card'
import { CopyId } from '../parts/CopyId'
import { KeyTables } from '../parts/KeyHelp'
import { NotificationSettings } from '../parts/NotificationSettings'
import { Page } from '../parts/PageHead'
import { Tokens } from '../parts/Tokens'
import { SETTINGS } from '../words/settings'

const SCHEMES = ['auto', 'light', 'dark'] as const

export default function SettingsPage() {
  const query = useQuery(sessionQuery)
  const { isAdmin } = useRole()
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  const session = query.data
  const verdict = session && { tone: 'idle' as const, ...SETTINGS.verdict(session.Role, session.Project) }
  return (
    <Page title={SETTINGS.title} verdict={verdict || undefined}>
      <Card title={SETTINGS.session.title}>
        <Shown query={query} rows={2}>
          {(found) => found && <SessionFacts session={found} />}
        </Shown>
      </Card>
      {isAdmin && session && <Tokens own={session.TokenId} />}
      <NotificationSettings />
      <Card title={SETTINGS.theme.title}>
        <SegmentedControl
          aria-label={SETTINGS.theme.title}
          value={colorScheme}
          onChange={(value) => setColorScheme(value as 'auto')}
          data={SCHEMES.map((value) => ({ value, label: SETTINGS.theme[value] }))}
        />
      </Card>
      <Card title={SETTINGS.keys}>
        <KeyTables />
      </Card>
    </Page>
  )
}

function SessionFacts({ session }: { session: Session }) {
  const nodes = useQuery(nodesQuery()).data
  const ends = useTimeText((now) => ago(session.ExpiresAt, now))
  const { labels, permissions, otherPermissions, allProjects, server } = SETTINGS.session
  return (
    <FactList
      facts={[
        [labels.role, permissions[session.Role] ?? otherPermissions],
        [labels.project, session.Project || allProjects],
        [
          labels.token,
          <span key="token">
            <CopyId id={session.TokenId} /> {session.Description}
          </span>,
        ],
        [labels.ends, `${ends}, ${utc(session.ExpiresAt)}`],
        [labels.server, server(session.Version)],
        [labels.agents, nodes === undefined ? '…' : versionsOf(nodes)],
      ]}
    />
  )
}
