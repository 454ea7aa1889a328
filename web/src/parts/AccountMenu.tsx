import { Menu, useMantineColorScheme } from '@mantine/core'
import { useQueryClient } from '@tanstack/react-query'
import type { ReactElement } from 'react'
import { useNavigate } from 'react-router'

import { session } from '../api/client'

const SCHEMES = { auto: 'As the system', light: 'Light', dark: 'Dark' } as const

/** What the account button opens: theme, settings, sign out. */
export default function AccountMenu({ onClose, children }: { onClose: () => void; children: ReactElement }) {
  const navigate = useNavigate()
  const client = useQueryClient()
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  return (
    <Menu opened position="bottom-end" withinPortal onClose={onClose}>
      <Menu.Target>{children}</Menu.Target>
      <Menu.Dropdown>
        <Menu.Label>Theme</Menu.Label>
        {(['auto', 'light', 'dark'] as const).map((scheme) => (
          <Menu.Item key={scheme} onClick={() => setColorScheme(scheme)} aria-current={colorScheme === scheme || undefined}>
            {SCHEMES[scheme]}
            {colorScheme === scheme ? ' ✓' : ''}
          </Menu.Item>
        ))}
        <Menu.Divider />
        <Menu.Item onClick={() => void navigate('/settings')}>Settings</Menu.Item>
        <Menu.Item
          onClick={() =>
            void session.signOut().then(() => {
              client.clear()
              void navigate('/sign-in')
            })
          }
        >
          Sign out
        </Menu.Item>
      </Menu.Dropdown>
    </Menu>
  )
}
